"""Failures again, on random data: capsules read as untrusted input, replayed through the runner
that serves, made small, written as one script. Refuses to know prompts, pictures or text."""
