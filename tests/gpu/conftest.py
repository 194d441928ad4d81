"""A driver library that tests can script, under the true bindings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_fakes import HERE, clean_environ, compile_library


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the fake libnvidia-ml.so.1."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    compile_library(HERE / "fake_nvml.c", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture
def fake_nvml(nvml_folder: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that scripts the fake library and returns the environment in which it is found."""

    def script(*lines: str, **environ: str) -> dict[str, str]:
        state = tmp_path / "nvml.txt"
        state.write_text("".join(f"{line}\n" for line in lines))
        return {
            **clean_environ(),
            "LD_LIBRARY_PATH": str(nvml_folder),
            "FAKE_NVML": str(state),
            **environ,
        }

    return script
