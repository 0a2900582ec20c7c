"""From topic to topic, exactly once: copy large payments; none is lost and none is duplicated.

    headrace serve                      in another terminal
    headrace publish payments '{"id": "p1", "amount": 1500}'
    python examples/spark/topic_to_topic.py CHECKPOINT_DIR

Run it as often as you like, or kill it while it works: the next run continues where it stopped. The
tasks stage their rows in the broker, where readers do not see them, and one commit shows the whole
batch. The broker remembers which batches of this checkpoint are committed.
"""

import os
import sys

from headrace.spark import session

SERVERS = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999")


def main(checkpoint: str) -> None:
    spark = session("topic to topic")
    payments = (
        spark.readStream.format("headrace")
        .options(servers=SERVERS, topic="payments", valueFormat="json")
        .options(startingOffsets="earliest", group="large-payments")
        .schema("id STRING, amount DOUBLE, _key STRING")
        .load()
    )
    query = (
        payments.where("amount >= 1000")
        .selectExpr("_key AS key", "to_json(struct(id, amount)) AS value")
        .writeStream.format("headrace")
        .options(servers=SERVERS, topic="payments.large")
        .option("checkpointLocation", os.path.abspath(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    read = sum(int(progress["numInputRows"]) for progress in query.recentProgress)
    print(f"{read} payments looked at")


if __name__ == "__main__":
    main(*sys.argv[1:2])
