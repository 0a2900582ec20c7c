"""Operations: what can be asked of a broker by name. ``catalog.py`` declares them."""
