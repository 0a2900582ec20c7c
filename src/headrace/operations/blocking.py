"""The operations for programs that use threads; a test compares this list with the catalog."""

from __future__ import annotations

from headrace.operations.catalog import Operations
from headrace.shell import Shell, blocking


class BlockingOperations(Shell):
    create_topic = blocking(Operations.create_topic)
    change_topic = blocking(Operations.change_topic)
    delete_topic = blocking(Operations.delete_topic)
    list_topics = blocking(Operations.list_topics)
    topics = blocking(Operations.topics)
    topic_stats = blocking(Operations.topic_stats)
    offset_at = blocking(Operations.offset_at)
    find = blocking(Operations.find)
    create_subscription = blocking(Operations.create_subscription)
    delete_subscription = blocking(Operations.delete_subscription)
    subscriptions = blocking(Operations.subscriptions)
    subscription_stats = blocking(Operations.subscription_stats)
    seek = blocking(Operations.seek)
    advance = blocking(Operations.advance)
    positions = blocking(Operations.positions)
    wait_for = blocking(Operations.wait_for)
    commit_staged = blocking(Operations.commit_staged)
    abort_staged = blocking(Operations.abort_staged)
    dead_letter_topics = blocking(Operations.dead_letter_topics)
    dead_letters = blocking(Operations.dead_letters)
    dead_letter = blocking(Operations.dead_letter)
    redrive = blocking(Operations.redrive)
    edit_dead_letter = blocking(Operations.edit_dead_letter)
    purge_dead_letters = blocking(Operations.purge_dead_letters)
    scheduled = blocking(Operations.scheduled)
    cancel = blocking(Operations.cancel)
    report_pipeline = blocking(Operations.report_pipeline)
    pipelines = blocking(Operations.pipelines)
    pipeline_stats = blocking(Operations.pipeline_stats)
    stop_pipeline = blocking(Operations.stop_pipeline)
    producer = blocking(Operations.producer)
    flush = blocking(Operations.flush)
    info = blocking(Operations.info)
