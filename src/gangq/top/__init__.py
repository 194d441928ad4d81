"""gangq top: the fleet in a terminal, live.

==================  ================================================================================================
`gangq.top.tabs`    what each tab asks the database and shows of it: data, no terminal
`gangq.top.app`     the terminal: tabs, keys, and what they open (textual)
==================  ================================================================================================
"""
