"""The frontend's process has no torch in it, and starts without it."""

import subprocess
import sys

CODE = "import sys, vitrail.server.run, vitrail.cli; sys.exit('torch' in sys.modules)"


def test_the_frontend_imports_no_torch():
    subprocess.run([sys.executable, "-c", CODE], check=True)
