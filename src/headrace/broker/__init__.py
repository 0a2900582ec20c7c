"""What a broker means: topics, subscriptions, deliveries, dead letters, schedules, retention.

No sockets, no JSON protocols, no threads of its own. One event loop owns all of it; everything that
takes time answers through a callback on that loop. ``engine.Engine`` is the door.
"""
