"""Puts the public address, if there is one, into pages: `git clone URL` and badges."""

from typing import Any

from llm import __version__

_BADGES = "<!-- badges -->"
_NO_ADDRESS = (
    "`URL` has no public value yet. If you got the project as an archive, unpack it instead of "
    "cloning.\n\n"
)


def with_address(markdown: str, repository: str) -> str:
    """Return a page with the address in place of URL, and with badges in place of a comment.

    With an address, the paragraph that says what to do without one is removed.

    Args:
        markdown: The page.
        repository: The project's public address, or "".
    """
    shields = "https://img.shields.io/badge"
    badges = (
        f"[![version {__version__}]({shields}/version-{__version__}-blue)]({repository}/releases)\n"
        f"[![Python 3.11 or newer]({shields}/python-3.11+-blue)]({repository})\n"
        f"[![MIT License]({shields}/license-MIT-blue)]({repository})\n"
    )
    if not repository:
        return markdown.replace(f"{_BADGES}\n\n", "")
    markdown = markdown.replace(f"{_BADGES}\n", badges).replace(_NO_ADDRESS, "")
    return markdown.replace("git clone URL", f"git clone {repository}")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Change a page that mkdocs reads."""
    return with_address(markdown, (config.repo_url or "").rstrip("/"))
