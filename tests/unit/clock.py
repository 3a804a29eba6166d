# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The clocks of a host, which a test sets."""

import datetime

import fixtures


class Clock:
    """The clocks of a host."""

    def __init__(self, test):
        self.boot, self.seconds = 'boot', 1000.0
        self.wall = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)
        for name, function in (('now', self.now), ('moment', self.moment)):
            test.useFixture(fixtures.MonkeyPatch(
                f'nova_accel.text.{name}', function))

    def go(self, seconds):
        self.seconds += seconds
        self.wall += datetime.timedelta(seconds=seconds)

    def moment(self):
        return f'{self.boot} {self.seconds}'

    def now(self, days=0, to='seconds'):
        return (self.wall - datetime.timedelta(days)).isoformat(timespec=to)
