"""Ships examples/ in the package, for `llm-trainers quickstart`; pyproject.toml has the rest."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copy the examples next to the modules; an editable install finds them in the clone."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not self.editable_mode:
            examples = Path(self.build_lib, "llm", "examples")
            shutil.rmtree(examples, ignore_errors=True)
            shutil.copytree("examples", examples, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithExamples})
