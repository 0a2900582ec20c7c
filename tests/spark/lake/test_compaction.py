"""Which files are joined: small ones of one partition, and none again and again."""

from headrace.spark.lake.compaction import plan_groups
from headrace.spark.lake.offsets import Offsets, Span
from headrace.spark.lake.table import DataFile

TARGET = 64_000


def file_of(name: str, size: int, start: int = 0, day: str | None = "1") -> DataFile:
    offsets = Offsets([Span("t", 0, start, start + 1)])
    return DataFile(name, 1, size, {"day": day}, offsets)


def names(groups: list[list[DataFile]]) -> list[list[str]]:
    return [[file.path for file in group] for group in groups]


def test_files_of_one_partition() -> None:
    """Smallest first, partitions apart."""
    files = [file_of("c", 100, 3), file_of("a", 200, 1), file_of("b", 50, 2)]
    others = [file_of("x", 100, day="2"), file_of("y", 100, day=None), file_of("z", 9, day="None")]
    assert names(plan_groups([*files, *others], TARGET, tiered=False)) == [["b", "c", "a"]]


def test_large_files_are_left_alone() -> None:
    files = [file_of("big", TARGET), file_of("nearly", TARGET * 4 // 5), file_of("small", 10)]
    assert plan_groups(files, TARGET, tiered=False) == []


def test_groups_have_the_target_size() -> None:
    files = [file_of(str(number), TARGET // 4, number) for number in range(10)]
    assert [len(group) for group in plan_groups(files, TARGET, tiered=False)] == [4, 4, 2]


def test_a_file_is_rewritten_seldom() -> None:
    """Growing by one small file at a time, it is rewritten about log(n) times, not n."""
    files: list[DataFile] = []
    rewritten = written = 0
    for number in range(1000):
        files.append(file_of(f"n{number}", TARGET // 100, number))
        written += TARGET // 100
        for group in plan_groups(files, TARGET * 100, tiered=True):
            size = sum(file.bytes for file in group)
            rewritten += size
            files = [file for file in files if file not in group]
            files.append(file_of(f"j{number}-{size}", size, number))
    assert len(files) < 30
    assert rewritten < 12 * written
