"""Which releases of the backends' distributions are beside torch: what planners take as data. Reads
the package metadata alone; imports none of them."""

from importlib.metadata import PackageNotFoundError, version

from vitrail.attention.plan import DISTRIBUTIONS


def releases() -> dict[str, str]:
    """Release by backend, of those that are installed."""
    found: dict[str, str] = {}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            continue
    return found
