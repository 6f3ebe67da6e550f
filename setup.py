"""Builds the one extension, `plait._C`, with pybind11 and ninja.

Not a general build system: it writes one `build.ninja` (depfiles included) for the C++17 sources in `csrc/` and
runs it. Neither torch nor a CUDA toolkit is needed: the CUDA driver is opened at run time.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -Wall -Wextra"


class NinjaBuild(build_ext):
    """Compiles every `csrc/*.cpp` into the extension module; only what changed is compiled again."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / "csrc"
        target.parent.mkdir(parents=True, exist_ok=True)
        build_dir.mkdir(parents=True, exist_ok=True)
        includes = f"-I{ROOT / 'csrc'} -isystem {pybind11.get_include()} -isystem {sysconfig.get_paths()['include']}"
        compiler = os.environ.get("CXX", "g++")
        flags = f"{FLAGS} {os.environ.get('CXXFLAGS', '')}".strip()
        link_flags = f"-shared -pthread {os.environ.get('LDFLAGS', '')}".strip()
        lines = [
            f"rule cxx\n  command = {compiler} {flags} {includes} -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d\n  deps = gcc\n  description = CXX $in",
            f"rule link\n  command = {compiler} $in {link_flags} -ldl -o $out\n  description = LINK $out",
        ]
        objects = []
        for source in sorted(ext.sources):
            objects.append(str(build_dir / (Path(source).stem + ".o")))
            lines.append(f"build {objects[-1]}: cxx {ROOT / source}")
        lines.append(f"build {target}: link {' '.join(objects)}")
        (build_dir / "build.ninja").write_text("\n".join(lines) + "\n")
        subprocess.run([os.path.join(ninja.BIN_DIR, "ninja"), "-C", str(build_dir)], check=True)


setup(
    ext_modules=[Extension("plait._C", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.cpp")))],
    cmdclass={"build_ext": NinjaBuild},
)
