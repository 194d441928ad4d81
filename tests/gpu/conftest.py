"""Driver libraries that tests can script, under the true bindings."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu.gpu_fakes import HERE, clean_environ, compile_library, rewrite

Script = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the fake libnvidia-ml.so.1."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    compile_library(HERE / "fake_nvml.c", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture
def fake_nvml(nvml_folder: Path, tmp_path: Path) -> Script:
    """Return a function that scripts the fake library and returns the environment in which it is found."""

    def script(*lines: str, **environ: str) -> dict[str, str]:
        state = tmp_path / "nvml.txt"
        rewrite(state, *lines)
        return {
            **clean_environ(),
            "LD_LIBRARY_PATH": str(nvml_folder),
            "FAKE_NVML": str(state),
            **environ,
        }

    return script


@pytest.fixture(scope="session")
def old_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds a fake library without the functions of newer drivers."""
    folder = tmp_path_factory.mktemp("old_nvml")
    compile_library(HERE / "fake_nvml.c", folder / "libnvidia-ml.so.1", "-DOLD_DRIVER")
    return folder


_SIZES = {
    "amdsmi_asic_info_t": 896,
    "amdsmi_enumeration_info_t": 272,
    "amdsmi_engine_usage_t": 64,
    "amdsmi_vram_usage_t": 16,
    "amdsmi_error_count_t": 64,
    "amdsmi_power_info_t": 192,
    "amdsmi_pcie_info_t": 512,
    "amdsmi_violation_status_t": 6016,
    "amdsmi_proc_info_t": 704,
    "amdsmi_evt_notification_data_t": 272,
    "amdsmi_xgmi_info_t": 64,
}
"""Structures of the binding as fake_amdsmi.c lays them out; they change from release to release."""


@pytest.fixture(scope="session")
def rocm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ROCM_PATH with a fake library that has every symbol the installed binding wants."""
    binding = find_spec("amdsmi")
    if binding is None or binding.origin is None:
        pytest.fail("amdsmi is not installed: it comes with gangq[dev]")
    wrapper = (Path(binding.origin).parent / "amdsmi_wrapper.py").read_text()
    wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    written = (HERE / "fake_amdsmi.c").read_text()
    stubs = sorted(name for name in wanted if f"EXPORT int {name}(" not in written)
    folder = tmp_path_factory.mktemp("rocm")
    (folder / "lib").mkdir()
    source = folder / "amdsmi.c"
    source.write_text(
        written + "".join(f"EXPORT int {name}(void) {{ return NOT_SUPPORTED; }}\n" for name in stubs)
    )
    compile_library(source, folder / "lib" / "libamd_smi.so")
    program = "from amdsmi import amdsmi_wrapper as w; from ctypes import sizeof; import sys\n"
    program += "print(*(sizeof(getattr(w, name)) for name in sys.argv[1:]))"
    said = subprocess.run(
        [sys.executable, "-c", program, *_SIZES],
        env={**clean_environ(), "ROCM_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if said.stdout.split() != [str(size) for size in _SIZES.values()]:
        pytest.fail(f"this amdsmi's structures differ from the fake library's: {said.stdout}{said.stderr}")
    return folder


@pytest.fixture
def fake_amdsmi(rocm_path: Path, tmp_path: Path) -> Script:
    """Return a function that scripts the fake library and returns the environment in which it is found."""

    def script(*lines: str, **environ: str) -> dict[str, str]:
        state = tmp_path / "amdsmi.txt"
        rewrite(state, *lines)
        # An NVIDIA library that is empty keeps a real one out of the way.
        (tmp_path / "libnvidia-ml.so.1").touch()
        return {
            **clean_environ(),
            "LD_LIBRARY_PATH": str(tmp_path),
            "ROCM_PATH": str(rocm_path),
            "FAKE_AMDSMI": str(state),
            **environ,
        }

    return script
