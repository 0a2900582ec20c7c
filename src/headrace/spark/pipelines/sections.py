"""Values of a declaration, read strictly.

A :class:`Section` is a table of the file together with where it stands. Each value is taken by its name
and type; what was not taken by anybody at the end is a mistake: a misspelt key that is silently ignored
is how a pipeline does the wrong thing for a year. Every mistake names the file, the line, the pipeline and the key.

Mistakes are collected, so that a user sees all of them at once: a value that is wrong is noted, and reading goes
on with its default. :meth:`Section.finish` raises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class InvalidPipeline(InvalidArgument, code="invalid_pipeline"):
    """A pipeline's declaration that cannot be. Its message has a line for each mistake."""

    @property
    def mistakes(self) -> list[str]:
        return self.message.splitlines()


class Section:
    """A table of the file, and where it stands."""

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        label: str = "",
        *,
        path: str = "",
        lines: Mapping[tuple[str, ...], int] | None = None,
        keys: tuple[str, ...] = (),
        mistakes: list[InvalidPipeline] | None = None,
    ):
        self._values = dict(values)
        self._known: set[str] = set()
        self._file = file
        self._label = label
        """The pipeline, or another part of the file."""
        self._path = path
        """The keys that lead here from there, each with a point after it."""
        self._lines = lines or {}
        """The lines of the file's keys, by all names that lead to them."""
        self._keys = keys
        """The names that lead here."""
        self._mistakes = [] if mistakes is None else mistakes

    # --- mistakes ---------------------------------------------------------------------------
    def wrong(self, key: str, why: object) -> InvalidPipeline:
        return InvalidPipeline(
            f"{self.place(key)}: {self._path}{key}: {' '.join(str(why).split())}"
        )

    def note(self, key: str, why: object) -> None:
        """A mistake that does not keep the rest from being read."""
        self._mistakes.append(self.wrong(key, why))

    def place(self, key: str) -> str:
        """The file, the line if it is known, and the pipeline if there is one."""
        names = (*self._keys, *key.split("."))
        line = next(
            (
                self._lines[names[:end]]
                for end in range(len(names), 0, -1)
                if names[:end] in self._lines
            ),
            None,
        )
        file = self._file if line is None else f"{self._file}:{line}"
        return f"{file}, {self._label}" if self._label else file

    def finish(self) -> None:
        """Raise all mistakes that were noted."""
        raise_all(self._mistakes)

    def checked(self, key: str, check: Callable[[Any], Any], value: Any) -> Any:
        """The value, checked by the model. One that is wrong is noted, and returned as it is."""
        try:
            return check(value)
        except HeadraceError as error:
            self.note(key, error)
            return value

    def end(self) -> None:
        """Whatever is left is a mistake."""
        for key in self._values:
            if key not in self._known:
                hint = suggestion(key, sorted(self._known))
                self.note(key, f"there is no such key; {hint}")

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
        try:
            return check("it", value, annotation)
        except HeadraceError as error:
            self.note(key, error)
            return default

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
            self.note(key, f"it is a table, not {value!r}")
            return None
        return Section(
            value,
            self._file,
            self._label,
            path=f"{self._path}{key}.",
            lines=self._lines,
            keys=(*self._keys, key),
            mistakes=self._mistakes,
        )

    def labelled(self, label: str) -> Section:
        """The same table as a part of the file that stands for itself, with mistakes of its own."""
        return Section(self._values, self._file, label, lines=self._lines, keys=self._keys)

    def sections(self, key: str) -> dict[str, Section]:
        """A table of tables, by name."""
        found = self.section(key)
        if found is None:
            return {}
        inner = {name: found.section(name) for name in found._values}
        return {name: section for name, section in inner.items() if section is not None}

    def options(self, key: str, prefix: str = "") -> dict[str, str]:
        """Options for Spark or a format; TOML turns points in names into tables, which is undone here."""
        found = self.section(key)
        if found is None:
            return {}
        flat: dict[str, str] = {}
        for name, value in _flattened(found._values, ""):
            if not isinstance(value, (str, int, float)):
                found.note(name, f"it is a text, a number, true or false, not {value!r}")
            name = name if name.startswith(prefix) else prefix + name
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return flat


def raise_all(mistakes: Sequence[InvalidPipeline]) -> None:
    """Raise the mistakes as one error, if there are any."""
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise InvalidPipeline("\n".join(each.message for each in mistakes))


@contextmanager
def gathered(mistakes: list[InvalidPipeline]) -> Iterator[None]:
    """A mistake that is raised inside is added to these."""
    try:
        yield
    except InvalidPipeline as error:
        mistakes.append(error)


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
