# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How the tests of stestr's last run ended."""

from stestr.repository import util
import testtools


def of_last_run(repository: str) -> dict[str, dict]:
    """Return each test of a repository's last run by its id, as StreamToDict
    describes it."""
    tests: dict[str, dict] = {}
    found = util.get_repo_open(repo_url=repository)
    # stestr records no run if it cannot import the tests
    if found.count():
        result = testtools.StreamToDict(
            lambda test: tests.__setitem__(test['id'], test))
        result.startTestRun()
        found.get_latest_run().get_test().run(result)
        result.stopTestRun()
    return tests
