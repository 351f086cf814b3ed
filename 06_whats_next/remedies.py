"""What to do about errors of the libraries that read data, by words in them."""

REMEDIES = {
    "No module named": "add the package with `uv add`",
    "codec": "add the package that has this codec",
    "conflicting sizes": "an append was cut off: append the rest, or cut what is longer",
    "fill_value": "write the attribute _FillValue as xarray does, in base64, or remove it",
}
OTHERWISE = "mend the store, or write it anew"


def find_remedy(
    error: Exception, remedies: dict[str, str] = REMEDIES, otherwise: str = OTHERWISE
) -> str:
    """The remedy for the first words that the error has."""
    for words, remedy in remedies.items():
        if words in str(error):
            return remedy
    return otherwise
