"""The console: pages in the browser from which an operator sees and does everything.

The broker serves it itself. Nothing is built, and nothing is loaded from elsewhere::

    GET /                             index.html: names the files below, with their common hash
    GET /console/<hash>/<file>        a script, the style sheet, the icon: cached for ever
    POST, DELETE /console/session     log in, log out: a cookie (``sessions.py``)
    everything else                   the public HTTP API, with the rights of the user

    static/  app.js      which page the address names, the frame around it, who is logged in
             api.js      requests, errors, reconnecting
             dom.js      elements: text is always set as text
             …           one module for each page, and for what several pages share

Rules:
- The console has no rights of its own and no route that answers with data: each number and each action is
  an operation of ``operations/``, so the command line and the clients have it too. An action that the user
  has no right for is not offered, and the broker refuses it anyway.
- Content from messages becomes text nodes, never markup. The Content-Security-Policy allows no inline
  script and no inline style, and no other origin.
- Secrets are in no address, no storage of the browser and no log: the login form sends them once, and the
  browser keeps an HttpOnly cookie.
- A page asks for one small document at a time, and again only when the answer has come: a slow broker gets
  fewer questions. A page that nobody sees asks nothing.
- The address after ``#`` names the page and what it shows, so every view is a link. Browsers do not send
  that part, so it is in no log.

Rejected:
- A framework with a build step: the files that run are the files that are read. Preact with htm was tried on
  paper: 14 KB of code from elsewhere for what 100 lines of ``dom.js`` do here.
- A page for each address (``/ui/topics/orders``): each reload would need the server's table of pages.
- Tokens in ``sessionStorage``: a script that gets in could read them; it cannot read an HttpOnly cookie.
- Signed cookies without a table of sessions: logging out could not end them.
- A separate port: one more address to open, to protect and to explain.
"""
