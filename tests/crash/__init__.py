"""Kill a broker under load, again and again, and look for what it lost.

``python -m tests.crash --kills 100`` does it. A *victim* (``victim.py``) runs a broker and the load
(``load.py``, ``consumers.py``); it tells everything it asks for and everything it is told to its
parent (``runner.py``) through a pipe, which a ``SIGKILL`` does not reach. What comes through the pipe is the history, and
``checker.py`` says what is wrong with it.
"""
