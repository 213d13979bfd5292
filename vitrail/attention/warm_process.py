"""A compiler's process: `python -m vitrail.attention.warm_process`, asked on its standard input by
`warm.warm_ahead`. It leaves kernels on disk and says nothing."""

import sys

import msgspec

from vitrail.attention.warm import Question, answer

if __name__ == "__main__":
    answer(msgspec.json.decode(sys.stdin.buffer.read(), type=Question))
