"""The rule by which a Kafka partition decides who owns it, and which of its records count.

A Headrace partition is a Kafka partition. Its records are *claims*, *stretches* and *checkpoints*::

    claim(epoch, node)   stretch(epoch, first offset, records)  checkpoint(epoch, first offset, number, part of parts)

    position   0           1             2           3            4               5             6
               claim 1 A   stretch 1 0+3 claim 2 B   stretch 1 3+1 checkpoint 2 3 stretch 2 3+2 claim 2 C
               A owns      0, 1, 2       B owns      void         state up to 3   3, 4          void

Whoever reads the partition applies the same rule and comes to the same result:

- a claim is valid if its epoch is higher than the current one; its node owns the partition from there on;
- a stretch is valid if it has the current epoch and begins at the next offset;
- a checkpoint is valid if, besides, it has the next number: its parts are counted, so that a late copy of an older
  one at the same offset is void;
- everything else is void, and is skipped.

Kafka only has to keep one order of records for each partition. Records may arrive late, twice or never; a node
may sleep for an hour and go on. Nothing here depends on time, on transactions, or on what Kafka's group protocol
says about owners.

:class:`Seat` is a node's side of it:

- It serves only after it has read its own claim back, because then it has also read everything before the claim.
- It has one record under way at a time. It shows and answers it only when it has *read it back*. Until then, it
  sends the same record again as often as it likes: the first one that arrives is valid, the others are void.
- It never takes a record back. The record's fate is known when it is read back, or when a higher claim is read:
  after that it can only be void. So the error is definite then, and unknown before.
- A node's name must be new for each process: two processes with one name would both take a claim for theirs.

A *checkpoint* holds all that a reader has to know of the records before it: it is a pure function of them. A
reader may therefore begin at any valid checkpoint, and the owner may delete all records before one. Both need a
checkpoint that its owner has read back, because a reader that begins there cannot judge it. The beginning of a
partition is always offset 0 or a valid checkpoint. A large checkpoint has several parts. Positions of subscriptions are
kept in a partition of their own under the same rule: a stretch there holds changes, and a checkpoint all of them.

Rejected: a *compacted* topic for positions, with the epoch in the keys. Compaction keeps the last record of a key,
and a claim that arrives twice is then moved after the records that it makes valid; a late record of an old owner
replaces the valid one that has its key, until somebody has copied it. ``min.compaction.lag.ms`` makes both rare, but
then correctness depends on time. Checkpoints need neither keys nor tombstones, and a new owner need not copy anything
before it serves. ``tests/engine/kafka/test_rule.py`` shows the failures of both kinds of keys.

Rejected: several records under way. If one fails, the others are void and have to be sent again in order; group
commit fills one large record while the one before it is under way.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Claim(NamedTuple):
    """A node wants to own the partition."""

    epoch: int
    node: str


class Stretch(NamedTuple):
    """Records that the owner appends at offsets."""

    epoch: int
    first_offset: int
    records: int


class Checkpoint(NamedTuple):
    """A part (1 to ``parts``) of what the owner knows about everything before the offset."""

    epoch: int
    first_offset: int
    number: int
    """Counts the parts of all checkpoints of the partition."""
    part: int
    parts: int


Entry = Claim | Stretch | Checkpoint


class Ownership:
    """What follows from a partition's records up to some position."""

    def __init__(self, epoch: int = 0, next_offset: int = 0, next_number: int = 0) -> None:
        self.epoch = epoch
        self.next_offset = next_offset
        self.next_number = next_number
        """The number of the next part of a checkpoint."""

    @classmethod
    def beginning_at(cls, first: Checkpoint) -> Ownership:
        """For a reader that begins with a checkpoint which its owner has read back."""
        return cls(first.epoch, first.first_offset, first.number)

    def apply(self, entry: Entry) -> bool:
        """Whether the record is valid; if so, it has its effect."""
        if isinstance(entry, Claim):
            if entry.epoch <= self.epoch:
                return False
            self.epoch = entry.epoch
            return True
        if entry.epoch != self.epoch or entry.first_offset != self.next_offset:
            return False
        if isinstance(entry, Stretch):
            self.next_offset += entry.records
            return True
        if entry.number != self.next_number:
            return False
        self.next_number += 1
        return True


class Parts:
    """Puts valid parts of checkpoints together."""

    def __init__(self) -> None:
        self._found: list[bytes] = []

    def read(self, entry: Entry, value: bytes) -> list[bytes] | None:
        """The parts of a checkpoint, if this valid record is its last one."""
        if not isinstance(entry, Checkpoint):
            self._found = []  # what was begun is given up
            return None
        if entry.part == 1:
            self._found = []
        if entry.part == len(self._found) + 1:
            self._found.append(value)
            if entry.part == entry.parts:
                found, self._found = self._found, []
                return found
        return None


class Judgement(Enum):
    """What a record that was read means for the node that read it."""

    VOID = "it has no effect"
    FOREIGN = "it is valid, and not what this node waits for"
    TAKEN = "this node owns the partition now"
    LOST = "another node owns the partition now; what was under way is void"
    STORED = "the record that was under way is valid"


class Seat:
    """One node's side of the rule in one partition. ``under_way`` is the record that it waits for."""

    def __init__(self, node: str, ownership: Ownership):
        self.node = node
        self.ownership = ownership
        self.owned: int | None = None
        """The epoch in which this node owns the partition."""
        self.under_way: Stretch | Checkpoint | None = None

    def claim(self) -> Claim:
        """A claim to send. The node serves when it has read it back."""
        return Claim(self.ownership.epoch + 1, self.node)

    def stretch(self, records: int) -> Stretch:
        """The next records."""
        assert self.owned is not None
        assert self.under_way is None
        self.under_way = Stretch(self.owned, self.ownership.next_offset, records)
        return self.under_way

    def checkpoint(self, part: int, parts: int) -> Checkpoint:
        """The next part of a checkpoint; all parts follow each other, with no stretch between them."""
        assert self.owned is not None
        assert self.under_way is None
        now = self.ownership
        self.under_way = Checkpoint(self.owned, now.next_offset, now.next_number, part, parts)
        return self.under_way

    def read(self, entry: Entry) -> Judgement:
        """The next record of the partition."""
        if not self.ownership.apply(entry):
            return Judgement.VOID
        if isinstance(entry, Claim):
            self.under_way = None
            if entry.node == self.node:
                self.owned = entry.epoch
                return Judgement.TAKEN
            self.owned = None
            return Judgement.LOST
        if entry == self.under_way:
            self.under_way = None
            return Judgement.STORED
        return Judgement.FOREIGN
