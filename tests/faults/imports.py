"""Imports: damaged and hostile files of other people's, to real `logitd import` processes.

Every kind of damage is searched for in one process by `tests/model/convert/test_any_damage.py`;
here are memory, time and exit codes as a person at a terminal sees them.
"""

import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from tests.faults.attack import Attack, Ground
from tests.model.convert.test_any_damage import CANARY, Exploding, nanogpt

SECONDS, MIB = 40.0, 1200
"""Within which an import has to end, most of them for importing torch, and the most it may take."""
MEASURED = """
import sys
from logitd.service.cli.main import run
code = run(["import", *sys.argv[1:]])
lines = open("/proc/self/status", encoding="ascii")
print("MiB", int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) // 1024)
sys.exit(code)
"""
"""The most memory that this program had: getrusage would say what the one had that started it."""


def attempt(ground: Ground, source: Path, *flags: str) -> tuple[int, str]:
    """The exit code of an import and what it said on stderr."""
    destination = ground.folder / "imported"
    shutil.rmtree(destination, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(destination), *flags],
        cwd=ground.folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1), f"{done.returncode}: {done.stderr}"
    assert done.returncode == 0 or "logitd import: " in done.stderr, done.stderr
    assert int(done.stdout.split()[-1]) < MIB, done.stdout
    assert not (ground.folder / CANARY).exists(), "code of the file ran"
    return done.returncode, done.stderr


def damaged_imports(ground: Ground, count: int) -> str:
    """Bytes changed, cut off or put in anywhere in torch's two formats, with code inside or not."""
    generator = random.Random(0)
    codes = [0, 0]
    for number in range(count):
        source = ground.folder / f"damaged-{number}" / "ckpt.pt"
        source.parent.mkdir()
        zipped, hostile = generator.random() < 0.5, generator.random() < 0.5
        torch.save(nanogpt(hostile), source, _use_new_zipfile_serialization=zipped)
        raw = bytearray(source.read_bytes())
        for _ in range(generator.randrange(1, 5)):
            place = generator.choice((generator.randrange(300), generator.randrange(len(raw))))
            match generator.randrange(3):
                case 0:
                    raw[place : place + 1] = generator.randbytes(1)
                case 1:
                    del raw[place : place + generator.randrange(1, 30)]
                case 2:
                    raw[place:place] = pickle.dumps(Exploding())
        source.write_bytes(raw)
        codes[attempt(ground, source, "--tokenizer", "none")[0]] += 1
    return f"{codes[1]} refused, {codes[0]} imported, no code ran"


def odd_sources(ground: Ground, count: int) -> str:
    """Pipes, devices, folders, sparse files and archives that unpack to gigabytes."""
    folder = ground.folder / "odd"
    folder.mkdir()
    refused = 0
    for number in range(count):
        name = f"odd-{number}"
        kind = number % 5
        source = folder / f"{name}{('.pt', '.safetensors', '.bin')[number // 5 % 3]}"
        match kind:
            case 0:
                os.mkfifo(source)
            case 1:
                source.symlink_to("/dev/zero")
            case 2:
                source.symlink_to(source)
            case 3:
                source.touch()
                os.truncate(source, 2**42)
            case _:
                with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr("archive/data.pkl", bytes(2**30))
        code, said = attempt(ground, source)
        assert code == 1, f"{source} was imported"
        assert name in said, said
        refused += 1
    return f"{refused} refused with the file's name"


ATTACKS = (
    Attack(
        "damaged imports",
        f"exit code 0 or 1 within {SECONDS:.0f} s and {MIB} MiB, no code runs",
        damaged_imports,
        short=4,
        long=200,
    ),
    Attack("odd sources", "exit code 1 and the file's name", odd_sources, short=5, long=15),
)
