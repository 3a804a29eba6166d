# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Functions have the names that images of the operator give them.

What a card loaded from its flash has no name of its own, and a server that asks
for a function by name is sent only to a region that shows the name as a trait;
any other one would be programmed with what it carries already. Glance is asked
in the background for the images of each function of the operator that has no
name: when nova-compute starts, when such a function appears, and once an hour,
as the operator may upload or rename an image. Names are kept in memory alone:
Glance has them, and a note of what a card has in its flash would be wrong
when the operator writes other content there.
"""

import concurrent.futures
import contextlib
import time

from nova_accel.attach import cloud as novas
from nova_accel.attach import publishing
from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)

#: seconds after which Glance is asked again; where it did not
#: answer; for which the start of nova-compute waits for it
_AGAIN, _RETRY, _START = 3600, 300, 5

#: a function, and the type of region that carries it
_Function = tuple[str, str | None]


class Names:

    def __init__(self, inventory: host_inventory.Inventory,
                 publisher: publishing.Publisher, cloud: novas.Cloud):
        self._inventory = inventory
        self._publisher = publisher
        self._cloud = cloud
        #: guards what follows
        self._lock = locks.Lock('names')
        #: those about which Glance was asked the last time
        self._asked: set[_Function] = set()
        #: time.monotonic() from which it is asked about them again, later
        #: after an answer than after a failure
        self._again = float('-inf')
        self._background = limited.Background(
            self._run, 'Which names functions of this host have was not found '
            'out')

    def start(self) -> None:
        """Ask now: the first report shows the names, where Glance answers
        soon. Without them it would take the traits of before away."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            limited.start(self._background.run).result(_START)

    def run_if_due(self) -> None:
        """Ask in the background, where there is something to ask."""
        if self._due():
            self._background.start()

    def _run(self):
        try:
            self.run()
        except exception.NoCredentials as error:
            LOG.debug('Functions have no names before a server asks for them: '
                      '%s', error)

    def run(self) -> None:
        """Ask Glance now for the functions that are due.

        :raises GlanceUnavailable: Glance did not answer nova-compute itself.
        :raises BitstreamError: Glance refused the request.
        """
        due = self._due()
        if not due:
            return
        with self._lock:
            # whatever happens, and however long it takes, not before
            self._asked, self._again = due, time.monotonic() + _RETRY
        client = self._cloud.service_images()
        for function, region_type in sorted(due, key=str):
            self._name(function, region_type, glance.find_function_name(
                client, function, region_type))
        with self._lock:
            self._again = time.monotonic() + _AGAIN

    def hear(self, image: glance.Image, region: model.Region) -> None:
        """Note the name that an image of the operator gives to its function,
        where other regions of a region's type have that without a name; they
        show it at once."""
        function = glance.function_id(image)
        name = glance.function_name(image)
        if (function and name and function not in model.SHARED_FUNCTIONS
                and glance.origin(image.entry) == model.OPERATOR
                and (function, region.region_type_uuid)
                in self._functions(named=False)):
            self._name(function, region.region_type_uuid, name)

    def _name(self, function, region_type, name):
        named = self._inventory.contents.name_function(
            function, region_type, name)
        if named:
            LOG.info('Function %s of %s has %s by the images of the operator',
                     function, ', '.join(f'{address} region{index}' for
                                         address, index in sorted(named)),
                     f'the name {name}' if name else 'no name')
            self._publisher.show(self._cloud.admin_context(), [
                uuid for uuid, provider in self._inventory.providers().items()
                if (provider.addresses[0], provider.region_index) in named])

    def _functions(self, named: bool = True) -> set[_Function]:
        """Functions of the operator that images can name.

        :param named: whether those count that have a name.
        """
        return {
            (region.function_uuid, region.region_type_uuid)
            for device in self._inventory.devices.values()
            for region in device.regions
            if region.origin == model.OPERATOR and region.function_uuid
            and region.function_uuid not in model.SHARED_FUNCTIONS
            and (named or region.function_name is None)}

    def _due(self) -> set[_Function]:
        """Return all that Glance has to be asked about, where that has to be
        now."""
        with self._lock:
            # one that got its name from Glance may get another one there
            found = self._functions(named=False) | (
                self._asked & self._functions())
            return (found if found - self._asked
                    or time.monotonic() >= self._again else set())
