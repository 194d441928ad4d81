"""The scripts of others that the page brings: unchanged, of the version that is said, and beside their licence."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import gangq.web

VENDOR = Path(gangq.web.__file__).parent / "static" / "vendor"


def test_the_scripts_are_of_the_version_that_the_readme_says_and_beside_their_licence() -> None:
    readme = (VENDOR / "README.md").read_text()
    (version,) = re.findall(r"^htmx ([\d.]+),", readme)
    assert f'version="{version}"' in (VENDOR / "htmx.min.js").read_text()
    assert (VENDOR / "LICENSE.htmx").read_text().startswith("Zero-Clause BSD\n")
    digests = {
        name: digest for digest, name in re.findall(r"^    ([0-9a-f]{64})  (\S+)$", readme, re.MULTILINE)
    }
    others = {file for file in VENDOR.iterdir() if file.name != "README.md"}
    assert digests == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in others}
