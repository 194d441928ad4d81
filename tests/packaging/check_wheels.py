"""`sql/` must be found from a wheel, a wheel built out of the sdist, an editable install and a checkout.

Run by `make wheel-check`. Builds the distributions, installs each into a fresh virtual environment, and lets the
installed `gangq.schema` list the files. Exits non-zero at the first that differs from the checkout's.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = (
    "import gangq.schema as s, hashlib;"
    "print(sorted((f.name, hashlib.sha256(f.text.encode()).hexdigest()) for f in s.sql_files()))"
)


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a command and return its output; its failure is ours."""
    done = subprocess.run([str(a) for a in argv], cwd=cwd, check=False, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, argv))}\n{done.stdout}{done.stderr}")
    return done.stdout


def listed_by(python: Path, cwd: Path) -> str:
    """The SQL files that this interpreter's gangq finds."""
    return run(python, "-c", LIST, cwd=cwd)


def fresh(place: Path, *install: str | Path) -> Path:
    """A new virtual environment with `install` and what it depends on."""
    venv.create(place, with_pip=True, system_site_packages=False)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *install, cwd=place)
    return python


def main() -> None:
    """Build, install four ways, compare."""
    with tempfile.TemporaryDirectory(prefix="gangq-wheels-") as scratch:
        work = Path(scratch)
        expected = listed_by(Path(sys.executable), ROOT)
        if "0001_foundation" not in expected:
            sys.exit(f"the checkout lists no migrations: {expected}")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", work / "direct", ROOT, cwd=work)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", work / "sdist", ROOT, cwd=work)
        (sdist,) = (work / "sdist").glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            packed = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
        tracked = run("git", "ls-files", "docs", "README.md", cwd=ROOT).split()
        if lacking := sorted({Path(name) for name in tracked} - packed):
            sys.exit(f"the sdist lacks {', '.join(map(str, lacking))}")
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work / "indirect", sdist, cwd=work)
        (direct,) = (work / "direct").glob("*.whl")
        (indirect,) = (work / "indirect").glob("*.whl")
        python = fresh(work / "venv", direct)
        ways = {"wheel": listed_by(python, work)}
        for way, what in (("wheel from the sdist", [indirect]), ("editable install", ["-e", ROOT])):
            run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *what, cwd=work)
            ways[way] = listed_by(python, work)
        run(python, "-m", "pip", "uninstall", "-q", "-y", "gangq", cwd=work)
        ways["checkout"] = run(
            python, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {LIST}", cwd=work
        )
        for way, listed in ways.items():
            if listed != expected:
                sys.exit(f"{way}: sql/ differs from the checkout's:\n{listed}\n{expected}")
            print(f"{way}: {listed.count('.sql') or listed.count('(')} SQL files")


if __name__ == "__main__":
    main()
