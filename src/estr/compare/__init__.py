"""``estr compare``: a study of recipes on one configuration, from its runs to tables, intervals and a page."""
