"""Which releases of the backends' distributions are beside torch: what planners take as data. Reads
the package metadata alone; imports none of them."""

from importlib.metadata import PackageNotFoundError, version

from vitrail.attention.plan import DISTRIBUTIONS


def release(distribution: str) -> str | None:
    """Of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def releases() -> dict[str, str]:
    """Release by backend, of those that are installed."""
    found = {name: release(distribution) for name, distribution in DISTRIBUTIONS.items()}
    return {name: each for name, each in found.items() if each is not None}
