# SPDX-License-Identifier: Apache-2.0
"""Docstrings are sentences, and functions are named by what they do or return.

A module, a class, a property or an attribute may be described by a noun phrase ("The seconds of a
step."). A function needs a verb. Nothing may begin with a preposition, or with a pronoun whose
noun stands in another docstring.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import noisescale

PACKAGE = Path(noisescale.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PREPOSITIONS = words(
    "about after against along among as at before behind below beside between beyond by despite "
    "during for from in inside into like of off on onto out outside over past per since through "
    "till to toward towards under until up upon via with within without"
)
PRONOUNS = words(
    "he her his it its itself she that their them these they this those such likewise so"
)
DETERMINERS = words(
    "a all an another any both each either every few half many more most no several some the "
    "how what when where whether which who whose why"
)
VERBS = r"\b(is|are|was|were|has|have|had|do|does|did|may|can|must|will|would|need|needs)\b|[=<>]"
CLAUSES = r"\b(that|which|who|whose|where|what|how|whether|as|if|while|when|until|why)\b"

PARTICIPLES = words(
    "told said given kept drawn shown made known found seen taken written chosen begun done gone "
    "come came left held sent met built lost hidden spent brought thought meant"
)
NOT_PARTICIPLES = words("need feed seed speed embed red bed hundred indeed")
FUNCTION_WORDS = (
    PREPOSITIONS
    | PRONOUNS
    | DETERMINERS
    | words("once now then here there alike apart others other none only not and or if")
)

STAYS = {
    ("of", "classmethod"): "The constructor from what a record is made of: `Segments.of(history)`.",
    ("reached", "property"): "A fact of each pass in a list: whether it reached a parameter.",
    ("diverged", "property"): "A number of trials, beside `reached`.",
    ("resolved", "cached_property"): "A fact of each row of a curve.",
    ("recommended", "cached_property"): "The recommended row, as the JSON's key has it.",
    ("branched", "property"): "The field of what `branch` returns: a `BranchedRun`.",
    ("until", "property"): "The end of the branches' course, beside `start`.",
}
"""Names that may stay with a decorator, and why. A name that is true or false always may."""

READ_WITH_THEIR_OBJECT = words("at until between after above below")
"""Methods that may be named by a preposition: `history.until(step)` reads as a phrase."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def decorators(function: Function) -> set[str]:
    return {ast.unparse(node).split(".")[-1] for node in function.decorator_list}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield the line of each docstring, its text, and whether it must have a verb."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            acts = isinstance(node, Function) and not any(
                name.endswith("property") for name in decorators(node)
            )
            yield node.body[0].lineno, ast.get_docstring(node) or "", acts
        for block in ("body", "orelse"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                for before, after in pairwise(statements):
                    match before, after:
                        case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                            yield after.lineno, text, False


def is_fragment(docstring: str, *, needs_verb: bool) -> bool:
    """Whether the first sentence begins with a preposition or pronoun, or lacks a needed verb."""
    first = re.split(r"\.\s|\.$|\n\n", docstring.strip(), maxsplit=1)[0]
    opening = "".join(re.findall(r"^[a-z'-]+", first.lower()))
    if opening in PREPOSITIONS | PRONOUNS:
        return True
    verb, clause = re.search(VERBS, first), re.search(CLAUSES, first.lower())
    if not needs_verb or (verb and not (clause and clause.start() < verb.start())):
        return False
    # An imperative verb comes first, without an article, and its object follows without "of".
    noun = re.match(r"[\w'-]+( of\b| \(|,|:|;|$)", first)
    return opening in DETERMINERS | {""} or noun is not None


def is_bare(function: Function) -> bool:
    """Whether a name has neither a noun nor a verb. "Reached" may name what is true or false."""
    parts = function.name.strip("_").split("_")
    participles = [
        word in PARTICIPLES or (word.endswith("ed") and word not in NOT_PARTICIPLES)
        for word in parts
    ]
    if function.name.startswith("__") or any(
        not participle and word not in FUNCTION_WORDS
        for word, participle in zip(parts, participles, strict=True)
    ):
        return False
    states_a_fact = function.returns is not None and ast.unparse(function.returns) == "bool"
    is_method = bool(function.args.args) and function.args.args[0].arg == "self"
    if is_method and function.name in READ_WITH_THEIR_OBJECT:
        return False
    stays = any((function.name, decorator) in STAYS for decorator in decorators(function))
    return not stays and not (states_a_fact and any(participles))


def sources() -> Iterator[tuple[Path, ast.Module]]:
    return ((path.relative_to(PACKAGE), ast.parse(path.read_text())) for path in MODULES)


def test_docstrings_are_sentences() -> None:
    fragments = [
        f"{path}:{line}: {text}"
        for path, tree in sources()
        for line, text, acts in docstrings(tree)
        if is_fragment(text, needs_verb=acts)
    ]

    assert not fragments


def test_examples_have_the_heading_that_the_site_shows_as_code() -> None:
    """Under "Example:" a line of code would be a quotation of a quotation."""
    assert not [m for m in MODULES if re.search(r"^ *Example:$", m.read_text(), re.MULTILINE)]


def test_functions_are_named_by_nouns_and_verbs() -> None:
    bare = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in sources()
        for node in functions_in(tree)
        if is_bare(node)
    ]

    assert not bare


def test_fragments_and_bare_names_are_known() -> None:
    fragments = ["The seconds of a step.", "Whether a step is due.", "|g|² of the step."]
    fragments += ["Mean of 1/n; infinite if a part is empty.", "Those of its edges that are cut."]
    sentences = [
        "Return the seconds of a step.",
        "g_i = Σ_t d_t.",
        "Every rank is a part, as it is.",
    ]
    bare = ["def informed(run): ...", "def whose(run): ...", "def of(self, rows): ..."]
    bare += ["def _merged_into(layout) -> Layout: ..."]
    named = ["def reached(self) -> bool: ...", "def averaged_gradient(rows): ..."]
    named += ["@classmethod\ndef of(cls, rows): ...", "def seed(run): ..."]

    assert [is_fragment(text, needs_verb=True) for text in fragments] == [True] * 5
    assert [is_fragment(text, needs_verb=True) for text in sentences] == [False] * 3
    assert is_fragment("Of the best point; NaN before it is known.", needs_verb=False)
    assert not is_fragment("The seconds of a step.", needs_verb=False)
    for sources_of, expected in ((bare, True), (named, False)):
        assert [is_bare(next(functions_in(ast.parse(s)))) for s in sources_of] == [expected] * 4
