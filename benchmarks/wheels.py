"""Makes the folder of wheels that a bare machine lacks: `python benchmarks/wheels.py [folder=wheels]`.

Bare is: x86-64 Linux, Python 3.12, PyTorch 2.11 with its Triton, Lightning, no network. Versions are those of
constraints.txt, and the ones below of what it does not name. What the folder has is not fetched again. The standard
library and pip are all that this needs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
MOST_MIB = 60  # what may travel, with the tree

# What is imported where, and what for: see NEEDS in gpu.py. No dependency is followed: these are all.
PACKAGES = {
    "hydra-core": "",
    "omegaconf": "",
    "antlr4-python3-runtime": "4.9.3",  # there is no wheel of it: it is built
    "tokenizers": "",
    "pytest": "",
    "pytest-xdist": "",
    "pytest-timeout": "",
    "execnet": "2.1.2",
    "iniconfig": "2.3.1",
    "pluggy": "1.7.0",
    "packaging": "26.3",
    "pygments": "2.21.0",
    "liger-kernel": "0.8.5",
    "fla-core": "",
    "flash-linear-attention": "",
    "einops": "",
}
BUILT = {"antlr4-python3-runtime"}


def versions() -> dict[str, str]:
    """The version of each package, from constraints.txt unless it stands above."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: version or pinned[name] for name, version in PACKAGES.items()}


def wheel(folder: Path, name: str, version: str) -> Path | None:
    """The file of a package in a folder; None if it has none."""
    start = f"{re.sub(r'[-_.]+', '_', name)}-{version}-".lower()
    return next((path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(start)), None)


def fetch(folder: Path, name: str, version: str) -> Path:
    """The wheel of a package, from the index that pip is configured for. Raises ValueError if that fails."""
    build = [] if name in BUILT else ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    where = [] if name in BUILT else [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "wheel" if name in BUILT else "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=folder) as partial:  # so that a wheel that lies in the folder is whole
        command += [*build, *where, "-w" if name in BUILT else "-d", partial, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = wheel(Path(partial), name, version)
        if done.returncode or found is None:
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ValueError(f"{name} {version} cannot be had ({said}): is there a network? The same command goes on")
        return found.rename(folder / found.name)


def tracked_mib() -> float:
    """Of the files that travel with the wheels: those that git tracks. 0 without git."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


def main(folder: Path) -> None:
    """Fetches what is missing and prints all sizes. Raises ValueError if something cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0.0
    for name, version in versions().items():
        path = wheel(folder, name, version) or fetch(folder, name, version)
        total += (size := path.stat().st_size / 2**20)
        print(f"{size:7.2f} MiB  {path.name}", flush=True)
    tree = tracked_mib()
    print(f"{total:7.2f} MiB  all {len(PACKAGES)} wheels; {total + tree:.2f} MiB with the tree, of {MOST_MIB}")


if __name__ == "__main__":
    words = {name: value for name, _, value in (word.partition("=") for word in sys.argv[1:])}
    if words.keys() - {"folder"}:
        sys.exit(f"error: cannot read '{(words.keys() - {'folder'}).pop()}'; there is folder=wheels")
    try:
        main(Path(words.get("folder", ROOT / "wheels")))
    except ValueError as error:
        sys.exit(f"error: {error}")
