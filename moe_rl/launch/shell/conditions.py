"""What `[ ... ]` and `printf` give, where that follows from their words alone."""

import fnmatch
import operator
import re

from moe_rl.launch.sources import Text, Where, missing_in, texts_of

INTEGER = re.compile(r"-?\d+")


def test(words: list[Text]) -> bool | None:
    """Return what `[ ... ]` gives; None where a value is unknown or the test looks at the machine."""
    # The loosest operator splits first; true || unknown is true, false && unknown is false.
    texts = texts_of(words)
    for joint, absorbing in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in texts:
            at = texts.index(joint)
            results = [test(words[:at]), test(words[at + 1 :])]
            if absorbing in results:
                return absorbing
            if None in results:
                return None
            return not absorbing
    if texts[:1] == ["!"]:
        inner = test(words[1:])
        if inner is None:
            return None
        return not inner
    # `[ -z "$UNSET" ]`: a variable that no file sets is taken to be unset, as it is in a clean shell.
    unknown = any(word.missing and not only_unset(word) for word in words)
    if unknown:
        return None
    match texts:
        case [only]:
            return bool(only)
        case ["-z", value]:
            return not value
        case ["-n", value]:
            return bool(value)
        case [left, "=" | "==", right]:
            # `[[ $X == a* ]]` is a pattern; in `[ ]` bash compares the text alone, which is the same without a star.
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as name, right]:
            if not INTEGER.fullmatch(left) or not INTEGER.fullmatch(right):
                return None
            return bool(getattr(operator, name[1:])(int(left), int(right)))
    return None


def only_unset(word: Text) -> bool:
    """Return whether all that is unknown in a word are variables that no file sets."""
    return all(re.fullmatch(r"\$[A-Za-z_]\w*", name) for name in word.missing)


def printf(words: list[Text], where: Where) -> Text:
    """Return what `printf` makes of a pattern and values; %s and %d are known."""
    pattern = words[0].text if words else ""
    # printf repeats its pattern for further values: launchers give as many as it takes.
    values = iter(texts_of(words[1:]))
    text = re.sub(r"%[-\d.]*[sd]", lambda _: next(values, ""), pattern).replace("\\n", "\n")
    return Text(text=text, where=where, missing=missing_in(words))
