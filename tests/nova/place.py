# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What Nova's tests find in this process: our driver, a state directory."""

import functools
import os

from tests import functional

import fixtures
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional import integrated_helpers
from nova.virt import libvirt
from nova.virt.libvirt import driver
from oslo_utils import importutils
import yaml

from nova_accel.virt import driver as accel_driver

# Nova 34
thread_pool_factory = importutils.try_import('nova.thread_pool_factory')

_HOST = {'cards': [{
    'address': '0000:5e:00.0', 'product': 'PAC_ARRIA10', 'ports': 1,
    'vfs': 1,
    'interface': '9926ab6d-6c92-5a68-aabc-a7d84c545738',
    'functions': ['d8424dc4-a4a3-c413-f89e-433683f9040b'],
    'programming_seconds': 0}]}


class Configuration(nova_fixtures.ConfFixture):
    """Nova's options for a test, with a state directory of its own."""

    #: whether each host has an FPGA card
    card = False

    def setUp(self):
        super().setUp()
        state = self.useFixture(fixtures.TempDir()).path
        self.config(state_path=state)
        # its default is in the state directory
        self.conf.set_default(
            'api_paste_config', functional.API_PASTE, group='wsgi')
        # Nova caches metadata by the address of a server, which is the same in
        # all tests
        self.config(metadata_cache_expiration=0, group='api')
        if self.card:
            path = os.path.join(state, 'host.yaml')
            with open(path, 'w') as file:
                yaml.safe_dump(_HOST, file)
            self.config(enabled_drivers=['dfl'], simulated_host=path,
                        group='accel')


def configure(card: bool) -> None:
    """Give every test a state directory, and the hosts a card if asked.

    A nova-compute that ends (Nova 34) closes all thread pools of the process
    for good, in a thread that may come to it only after its test: on a loaded
    machine every further test of the process would fail. Nova's fixture for
    services avoids it as long as the test lasts.
    """
    Configuration.card = card
    nova_fixtures.ConfFixture = Configuration
    if card:
        _leave_ours_out()
    if thread_pool_factory is not None:
        thread_pool_factory.shutdown_all_executors = lambda: None


def _leave_ours_out() -> None:
    """Hide our providers from tests that count the providers of a host."""
    helper = integrated_helpers.PlacementHelperMixin
    for name in ('_get_all_providers', '_get_all_rps_in_a_tree'):
        setattr(helper, name, _without_ours(getattr(helper, name)))


def _without_ours(providers):
    @functools.wraps(providers)
    def look(*args, **kwargs):
        found = providers(*args, **kwargs)
        return [p for p in found if '_accel_' not in p['name']]
    return look


def put_under_the_class() -> None:
    """Make LibvirtDriver(...) create our driver.

    What a test patches stays on LibvirtDriver itself, so that our override
    runs and has to hand over to the patched method what Nova hands over. For
    unit tests.
    """
    def new(cls, *args, **kwargs):
        return object.__new__(
            accel_driver.AccelLibvirtDriver if cls is driver.LibvirtDriver
            else cls)
    driver.LibvirtDriver.__new__ = new


def put_under_the_name() -> None:
    """Make nova.virt.libvirt.LibvirtDriver, which nova-compute loads, ours.

    Some functional tests wrap a method that they took from a running driver,
    by that name, and the wrapped method has to be the outermost. The class of
    nova.virt.libvirt.driver stays: in Nova 31 it calls super() by its name.
    """
    libvirt.LibvirtDriver = accel_driver.AccelLibvirtDriver
