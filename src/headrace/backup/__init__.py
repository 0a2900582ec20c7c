"""Backups of a broker: taken while it runs, kept in generations, verified, restored.

A backup is a directory. A *generation* in it is one point in time of the whole broker: the messages of every
partition up to an end, and the subscriptions, positions, delayed messages, dead letters, staged batches,
topic settings and access rules that belong to exactly these messages. A broker that is started on a restored
generation goes on as the original would have after a restart at that moment::

    BACKUP/
      @backup                       says that this is a backup, and its format
      @lock                         held (flock) by the one command that uses the backup
      @unfinished                   a manifest of what a killed backup had copied; the next one goes on from it
      generations/
        000007/manifest.json        what belongs to generation 7, with sizes and checksums; itself checksummed
        000007/journal              as @subscriptions.journal of a data directory
        000007/access.json          as @access.json: users, grants, hashes of passwords and tokens
      topics/
        orders@4711a/0/             topic, incarnation in hex, partition
          00000000000000000000.log  batches, as the broker stores them; small neighbours may be one batch
          00000000000000052000.log
          000007.producers          idempotent producers at the end of generation 7

How it works:

- The source (``sources.py``) fixes a point in time first, and says where each partition ends. Then its batches
  are copied up to there (``copying.py``). An offset means the same bytes for ever, so the next generation copies
  only what comes after the end of the last one: the last file grows until it has the size of a segment. An older
  generation needs only the first bytes of such a file, and its manifest says how many.
- "For ever" has exceptions: a broker that was restored from an older generation, or lost unsynced messages
  (``durability`` not ``always``), has other messages at offsets that the backup has. So the last records of each
  partition are compared with the broker's. Files whose last records differ are copied again, under another name.
- The manifest is written last, by a rename. A backup that is killed, on any side, leaves all earlier
  generations as they were: nothing that a manifest mentions is changed, only appended to. What it had copied
  is not copied again: ``@unfinished`` is written every minute, and at every error.
- Files that no generation mentions are removed at the beginning and at the end of the next backup.
- Names in a manifest are checked before they become paths (``manifest.py``).

What happens if, during a backup,

- retention wants to delete: it waits (``broker/backups.py``); if the disk becomes full, the backup fails instead;
- a topic is deleted: it is left out of the generation, as if it had been deleted just before;
- the broker is stopped, killed or restarted: a new point in time is fixed when it is back, and what was
  copied is kept;
- records of the source are damaged: they are marked as lost, as a repair by ``headrace doctor`` would; the
  command says so and exits with 1. Records that the backup has from before are kept.

Rejected: a copy of the broker's own files (needs the same machine and a broker that stands still); one archive
file for each generation (no increments, and nothing can be read without reading all); links to the files of
the data directory (the same disk fails once); compressing (topics can be compressed, and the bytes would no
longer be those of the broker); encrypting (use an encrypted file system or ``restic`` on top: keys that are
lost are the most common reason why a backup cannot be restored).
"""
