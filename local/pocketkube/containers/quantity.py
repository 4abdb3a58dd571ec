"""Kubernetes quantities ("500m", "2Gi") as exact numbers."""

from decimal import ROUND_CEILING, Decimal, InvalidOperation

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def parse_quantity(text: str) -> Decimal:
    """Parse a quantity.

    Raises:
        ValueError: `text` is no quantity.
    """
    number = text.rstrip("numkMGTPEi")
    suffix = text[len(number) :]
    # "1e3" and "12E" share a letter. An exponent belongs to the number.
    try:
        return Decimal(number) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError):
        raise ValueError(
            f"{text!r} is not a quantity; write a number with a suffix such as m, k, Mi or Gi"
        ) from None


def in_units_of(quantity: str, divisor: str) -> str:
    """Return `quantity / divisor`, rounded up, as resourceFieldRef does."""
    unit = parse_quantity(divisor) or Decimal(1)
    return str(int((parse_quantity(quantity) / unit).to_integral_value(ROUND_CEILING)))
