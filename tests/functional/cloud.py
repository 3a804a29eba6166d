# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud that lives as long as a class of tests.

The cloud is an instance of the test class that runs no test: Nova's harness
sets it up, and its fixtures end with the class. Each test takes over the
attributes of that instance, ends by deleting what it made, and sees that the
cloud is as at its start. A test that fails leaves its cloud to no other.
"""

import contextlib
import functools

from oslo_config import cfg
import testtools
from testtools import content

CONF = cfg.CONF


class Options:
    """The options that are set, to be set again after a test."""

    def __init__(self):
        self._before = dict(self._now())

    @staticmethod
    def _now():
        for info, group in CONF._all_opt_infos():
            if 'override' in info:
                yield ((info['opt'].dest, group and group.name),
                       info['override'])

    def restore(self):
        now = dict(self._now())
        for option in now.keys() - self._before.keys():
            CONF.clear_override(*option)
        for option, value in self._before.items():
            if option not in now or now[option] is not value:
                name, group = option
                CONF.set_override(name, value, group)


class CloudOfClass:
    """Before Nova's test case among the bases of a class.

    A subclass has build(), which sets up the cloud, and for tests that share
    one remember(), which notes its state, and empty(), which restores that.
    """

    #: whether each test gets a cloud of its own: for tests that configure
    #: the cloud, or leave it in a state that empty() cannot undo
    FRESH_CLOUD = False

    #: the cloud of this process, of which there is one at a time
    _running = None
    #: of an instance that is a cloud: what ends with it
    _ends = None
    _failed = False

    def build(self):
        raise NotImplementedError

    def remember(self):
        raise NotImplementedError

    def empty(self):
        raise NotImplementedError

    def setUp(self):
        # not that of Nova's test case, which is the cloud's
        testtools.TestCase.setUp(self)
        self.addCleanup(self._leave)
        self.addOnException(self._spoil)
        self.cloud = self._enter()
        for name, value in vars(self.cloud).items():
            if not name.startswith('_'):
                vars(self).setdefault(name, value)
        self.addCleanup(self._clear_attrs)

    def tearDown(self):
        if not self._failed and not self._is_fresh():
            self.empty()
        super().tearDown()

    @classmethod
    def tearDownClass(cls):
        cls.close_cloud()
        super().tearDownClass()

    # The life of a cloud

    def _is_fresh(self):
        test = getattr(self, self._testMethodName)
        return self.FRESH_CLOUD or getattr(test, 'fresh_cloud', False)

    def _enter(self):
        running = CloudOfClass._running
        if running and (type(running) is not type(self) or self._is_fresh()):
            self.close_cloud()
        if not CloudOfClass._running:
            cloud = type(self)(self._testMethodName)
            cloud._ends = contextlib.ExitStack()
            cloud.stopped = set()
            CloudOfClass._running = cloud
            cloud.build()
            if not self._is_fresh():
                cloud.remember()
        return CloudOfClass._running

    def _leave(self):
        if self._failed or self._is_fresh():
            self.close_cloud()

    def _spoil(self, _exc_info):
        """A test fails: keep the logs, and do not use the cloud again."""
        self._failed = True
        for name, text in self.logs():
            self.addDetail(name, content.text_content(text))

    def forget_log(self):
        """The next test shows only its own."""
        output = self.stdlog.logger._output
        output.seek(0)
        output.truncate()

    def logs(self):
        """Name and text of what tells about the present test."""
        cloud = CloudOfClass._running
        if cloud and 'stdlog' in vars(cloud):
            yield 'nova', cloud.stdlog.logger.output

    @staticmethod
    def close_cloud():
        """End the cloud of this process, if there is one."""
        cloud, CloudOfClass._running = CloudOfClass._running, None
        if cloud:
            cloud._ends.close()

    def addCleanup(self, function, *args, **kwargs):
        if self._ends:
            self._ends.callback(function, *args, **kwargs)
        else:
            # that of oslotest ends every mock, those of the cloud as well
            testtools.TestCase.addCleanup(self, function, *args, **kwargs)

    def start_service(self, *args, **kwargs):
        """A service that a test starts belongs to the cloud, too, and stops
        when the cloud ends."""
        if not self._ends:
            return self.cloud.start_service(*args, **kwargs)
        service = super().start_service(*args, **kwargs)
        stop = service.stop

        def wrapped(*args, **kwargs):
            self.stopped.add(service)
            return stop(*args, **kwargs)
        service.stop = wrapped
        return service


def fresh(test):
    """Decorator of a test that needs a cloud of its own, as FRESH_CLOUD."""
    test.fresh_cloud = True
    return test


def fresh_last(names_of):
    """getTestCaseNames() of unittest: tests that share a cloud follow each
    other."""
    @functools.wraps(names_of)
    def names(loader, kind):
        return sorted(names_of(loader, kind), key=lambda name: getattr(
            getattr(kind, name), 'fresh_cloud', False))
    return names
