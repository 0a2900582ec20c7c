"""A stream: count words as sentences arrive.

    headrace serve                                       in another terminal
    headrace publish sentences "to be or not to be"
    python examples/spark/word_count.py [--once]

After each batch it prints the words of that batch with their total counts. Ctrl-C ends it. With --once it
counts the records that exist now and exits. The counts and the position are kept in ./word-count, so the
next run continues there; another folder (WORD_COUNT_DIR) starts another count.
"""

import os
import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.spark import session

SERVERS = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999")


def show(counts: DataFrame, batch: int) -> None:
    for row in counts.orderBy(F.desc("count"), "word").collect():
        print(f"batch {batch}: {row.word} {row['count']}", flush=True)


def main(*arguments: str) -> None:
    folder = os.environ.get("WORD_COUNT_DIR", "word-count")
    spark = session("word count")
    sentences = (
        spark.readStream.format("headrace")
        .options(servers=SERVERS, topic="sentences", valueFormat="text", columns="value")
        .option("startingOffsets", "earliest")
        .load()
    )
    words = sentences.select(F.explode(F.split(F.lower("value"), r"\W+")).alias("word"))
    counting = (
        words.where("word != ''")
        .groupBy("word")
        .count()
        .writeStream.outputMode("update")
        .option("checkpointLocation", os.path.abspath(folder))
        .foreachBatch(show)
    )
    if "--once" in arguments:
        counting = counting.trigger(availableNow=True)
    query = counting.start()
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
