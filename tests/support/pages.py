"""docs/generate.py, which writes the parts of the documentation that come from the code."""

import runpy

from tests.support.package import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs/generate.py"))
to_markdown = GENERATOR["to_markdown"]
