"""make_seeds.py FOLDER: writes 64 files of random bytes, the same each time."""

import random
import sys
from pathlib import Path

generator = random.Random(1)
for number in range(64):
    Path(sys.argv[1], f"seed{number:02}").write_bytes(generator.randbytes(200))
