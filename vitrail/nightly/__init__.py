"""The night's run: tests registered by a mark, run file by file in processes of their own, and a
digest of what failed, grouped by cause. Knows nothing of engines or models; `choice` alone asks
one."""
