"""Pipelines in Python: a function over DataFrames, and a function for each row.

    headrace publish reviews 'lamp: **** bright'
    headrace pipeline run examples/pipelines/reviews.py --once

If ``stars_of`` raises, the row becomes a dead letter with that reason, and the query continues.
"""

import re

from headrace.spark.pipelines import each_row, pipeline


@pipeline(from_="reviews", format="text", to={"topic": "stars", "key": "product"}, failed=True)
def stars(reviews):
    """Turn lines such as ``lamp: **** bright`` into products with a number of stars."""
    return each_row(reviews.select("value"), stars_of, "product STRING, stars INT")


def stars_of(row):
    found = re.match(r"(\w+): (\*{1,5})(?!\*)", row["value"])
    if found is None:
        raise ValueError("it has no product, or not one to five stars")
    return {"product": found[1], "stars": len(found[2])}


@pipeline(from_="reviews", to="reviews-by-minute", mode="complete")
def reviews_by_minute(reviews):
    """Count the reviews of each minute; every batch writes all counts again."""
    from pyspark.sql import functions as F

    minutes = reviews.groupBy(F.window("timestamp", "1 minute").start.alias("minute"))
    return minutes.count()
