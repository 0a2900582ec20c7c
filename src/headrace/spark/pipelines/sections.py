"""Values of a declaration, read strictly.

A :class:`Section` is a table of the file together with where it stands. Each value is taken by its name
and type; what was not taken by anybody at the end is a mistake: a misspelt key that is silently ignored
is how a pipeline does the wrong thing for a year. Every error names the file, the pipeline and the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta

from headrace.checking import check
from headrace.errors import HeadraceError, InvalidArgument
from headrace.spark.error_sentences import be_quiet, sentence
from headrace.spark.notation import spark_duration
from headrace.spark.options import suggestion

_MISSING = object()
Text = Annotated[str, Meta(min_length=1)]
Texts = tuple[Text, ...]
"""A list, or a single text."""
Settings = Mapping[str, str]
"""A table of settings for Spark or for a format."""
Declared = TypeVar("Declared")


class InvalidPipeline(InvalidArgument):
    """A pipeline's declaration that cannot be."""

    code = "invalid_pipeline"


class Section:
    """A table of the file, and where it stands."""

    def __init__(self, values: Mapping[str, Any], where: str, path: str = ""):
        self._values = dict(values)
        self._known: set[str] = set()
        self.where = where
        """The file, and the pipeline if there is one."""
        self.path = path
        """The keys that lead here, each with a point after it."""

    # --- errors -----------------------------------------------------------------------------
    def wrong(self, key: str, why: object) -> InvalidPipeline:
        return InvalidPipeline(f"{self.where}: {self.path}{key}: {why}")

    def checked(self, key: str, check: Callable[[Any], Any], value: Any) -> Any:
        """The value, checked by the model; an error names its place."""
        try:
            return check(value)
        except HeadraceError as error:
            raise self.wrong(key, error) from None

    def end(self) -> None:
        """Whatever is left is a mistake."""
        for key in self._values:
            if key not in self._known:
                hint = suggestion(key, sorted(self._known))
                raise self.wrong(key, f"there is no such key; {hint}")

    # --- values -----------------------------------------------------------------------------
    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, default: Any = None) -> Any:
        """Whatever it is."""
        self._known.add(key)
        return self._values.get(key, default)

    def value(self, key: str, annotation: Any, default: Any = None) -> Any:
        """The value, checked against an annotation."""
        value = self.take(key, _MISSING)
        if value is _MISSING:
            return default
        value = value.strip() if isinstance(value, str) else value
        return self.checked(key, lambda each: check("it", each, annotation), value)

    def text(self, key: str, default: Any = None) -> Any:
        return self.value(key, Text, default)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list, or a single text."""
        found = self.value(key, Text | Texts, ())
        return (found,) if isinstance(found, str) else tuple(each.strip() for each in found)

    def duration(self, key: str, value: str) -> str:
        """As Spark takes it."""
        return str(self.checked(key, spark_duration, value))

    def read(self, kind: type[Declared], **given: Any) -> Declared:
        """A declaration. A field that is not ``given`` gets the value of the key with its name."""
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if name == "section":
                given[name] = self
            elif name not in given:
                default = getattr(kind, name, None)
                if hint == Texts:
                    given[name] = self.texts(name)
                elif hint == Settings:
                    given[name] = self.options(name)
                else:
                    given[name] = self.value(name, hint, default)
        return kind(**given)

    def section(self, key: str) -> Section | None:
        value = self.take(key, _MISSING)
        if value is _MISSING:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, f"it is a table, not {value!r}")
        return Section(value, self.where, f"{self.path}{key}.")

    def sections(self, key: str) -> dict[str, Section]:
        """A table of tables, by name."""
        found = self.section(key)
        if found is None:
            return {}
        return {name: found.section(name) or found for name in found._values}

    def options(self, key: str, prefix: str = "") -> dict[str, str]:
        """Options for Spark or a format; TOML turns points in names into tables, which is undone here."""
        found = self.section(key)
        if found is None:
            return {}
        flat: dict[str, str] = {}
        for name, value in _flattened(found._values, ""):
            if not isinstance(value, (str, int, float)):
                raise found.wrong(name, f"it is a text, a number, true or false, not {value!r}")
            name = name if name.startswith(prefix) else prefix + name
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return flat


@contextmanager
def analysed(section: Section, key: str) -> Iterator[None]:
    """An error that is raised inside is a mistake at this key of the file."""
    be_quiet()
    try:
        yield
    except InvalidPipeline:
        raise
    except Exception as error:
        raise section.wrong(key, sentence(error)) from error


def _flattened(values: Mapping[str, Any], before: str) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{before}{name}.")
        else:
            yield before + name, value
