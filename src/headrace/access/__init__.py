"""Who may do what: users, tokens and certificates, their rights and their quotas.

::

    @access.json ──read──▶ AccessRules ──▶ AccessControl ──▶ Caller: what one login may do
    (file.py)              (rules.py)      (control.py)      (caller.py), held by connections

The room knows names, patterns and secrets. It knows neither sockets nor the broker: ``server`` asks it
who a client is, ``broker/administration.py`` and ``server`` ask a :class:`~headrace.access.caller.Caller`
whether it may do something.

Rules:
- Access control is *on* as soon as the broker has a token or an access file. Then everything that is
  not granted is refused. It is *off* without both, and everybody may do everything.
- A decision is made by a ``Caller`` and nowhere else. A ``Caller`` is changed in place when the rules
  change, so a connection, a subscription or a remembered HTTP head that holds one never acts on old
  rights. Rejected: a generation number that every cached decision compares; it is one more thing that
  a new cache can forget.
- A file that cannot be read or does not match its checksum never means "everybody may": the broker
  does not start with it, and a broker that runs keeps the last good rules and says so.
- Secrets are never stored, logged or shown again: of a password there is an argon2 hash, of a token
  a SHA-256 (``hashing.py``).
"""
