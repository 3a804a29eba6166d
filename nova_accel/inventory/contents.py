# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What regions carry.

===================  ============================  ===========================
content of a region  comes by                      goes by
===================  ============================  ===========================
as the driver reads  forget(), ended(report)       begin(), set_loaded()
being programmed     begin(); durably unknown,     programmed(), ended()
                     with its origin
known                programmed(), set_loaded()    begin(), forget()
unknown              ended(report=False), or the   begin(), forget(),
                     process was killed meanwhile  set_loaded()
===================  ============================  ===========================

Each content has an origin (model.Region.origin). As the driver reads: the
operator's from the start, then what forget() was given, or the project of a
server that was found to be able to load what it likes (note_open()). Known:
that of the image; where the driver reads another function, as after a power
cut, the project's, because its function can answer as any other; the
operator's is not known then. Being programmed, unknown, and as the driver
reads after ended(): a project's where the image is, or where the region had a
project's content before, and not known where both are the operator's: the card
may have taken all of the image, a part or nothing of it.

Any other way raises IllegalTransition.
"""

from collections.abc import Iterator
import contextlib
import dataclasses

from nova_accel import exception
from nova_accel.inventory import state
from nova_accel import model
from nova_accel.store import claim_store

Key = tuple[str, int]


class Contents(state.State):

    def __init__(self, store: claim_store.ClaimStore):
        super().__init__(store)
        #: (function, type of region) -> name, by the operator's images
        self._names: dict[tuple[str, str | None], str] = {}
        self._programming: set[Key] = set()
        #: regions that are being cleaned, as they were before
        self._returning: dict[Key, model.Region] = {}

    def _with_content(self, address: str, region: model.Region,
                      ) -> model.Region:
        key = (address, region.index)
        function, image, name = region.function_uuid, None, None
        origin: str | None = model.OPERATOR
        loaded = self._store.loaded().get(key)
        if loaded:
            origin = (None if loaded.origin == model.OPERATOR
                      else loaded.origin)
            if loaded.content is None:
                function = None
            elif loaded.function_uuid == function:
                image, name = loaded.bitstream_id, loaded.function_name
                origin = loaded.origin
            elif not (loaded.function_uuid or loaded.bitstream_id):
                origin = loaded.origin
        if function and name is None and origin == model.OPERATOR:
            name = self._names.get((function, region.region_type_uuid))
        if (function, image, name, origin) == (
                region.function_uuid, region.bitstream_id,
                region.function_name, region.origin):
            return region
        return dataclasses.replace(
            region, function_uuid=function, bitstream_id=image,
            function_name=name, origin=origin)

    def content_of(self, address: str, index: int, image_id: str) -> str:
        """Return the hash of the content of an image that a region had last, as
        it was recorded; '' where the region had another one, or none."""
        loaded = self._store.loaded().get((address, index))
        return (loaded.content or '' if loaded
                and loaded.bitstream_id == image_id else '')

    def is_unknown(self, address: str, index: int | None) -> bool:
        """Return whether what a region carries is not known, as while a
        programming hangs, or after one whose end was not seen."""
        return index is not None and self._store.loaded().get(
            (address, index), model.AS_READ).content is None

    def _region(self, address: str, index: int) -> model.Region:
        device = self._reported.get(address)
        region = device.find_region(index) if device else None
        if region:
            return self._with_content(address, region)
        found = (f'{address} region{index} cannot be programmed, because it '
                 f'is not on this host any more')
        raise exception.DeviceUnavailable(
            f'{found}: build the server on another.', found=found)

    def is_programming(self, address: str) -> bool:
        with self._lock:
            return self._is_programming(address)

    def _is_programming(self, address):
        return any(a == address for a, _ in self._programming)

    def begin(self, address: str, index: int, origin: str | None) -> None:
        """Note durably that what the region carries is not known.

        Call it before the hardware is touched. Where what the region has or
        what it gets is a project's, that is the origin of what it carries
        until another programming has come to its end. Until programmed() or
        programming_failed() what scans say of the card is discarded.

        :param origin: of the image; None: Glance does not say whose it is.
        :raises IllegalTransition: the region is being programmed already.
        :raises DeviceUnavailable: the region is not on this host.
        :raises AcceleratorsUnavailable: the store cannot be written; nothing
            has changed.
        """
        key = (address, index)
        with self._writing:
            with self._lock:
                before = self._region(address, index)
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'{address} region{index} cannot be programmed while '
                        f'it is being programmed.')
            unknown = model.Loaded(
                None, None, None, None, before.origin_with(origin))
            self._store.set_loaded(address, index, unknown)
            with self._lock:
                self._programming.add(key)
                self._know(key, unknown)
        self.save()

    def programmed(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what was programmed and read back.

        :raises IllegalTransition: the region is not being programmed.
        :raises AcceleratorsUnavailable: the store cannot be written; the
            region ends as unknown.
        """
        with self._writing:
            self._ends((address, index))
            # a store that fails leaves the region unknown
            self._store.set_loaded(address, index, loaded)
            with self._lock:
                self._know((address, index), loaded)
        self.save()

    def ended(self, address: str, index: int, report: bool) -> None:
        """See Inventory.programming_failed()."""
        origin = self._ends((address, index))
        if report:
            self.forget(address, index, origin)

    def _ends(self, key: Key) -> str | None:
        """Return the origin of what the region carries until more is known.
        """
        with self._lock:
            if key not in self._programming:
                raise exception.IllegalTransition(
                    f'The programming of {key[0]} region{key[1]} cannot end, '
                    f'because none had begun.')
            self._programming.discard(key)
            self._since[key[0]] = next(self._clock)
            return self._store.loaded()[key].origin

    @contextlib.contextmanager
    def returning(self, address: str, index: int) -> Iterator[None]:
        """Show what a region had, while it is cleaned after a server.

        What the operator put there is programmed again or stays, and providers
        show it all the while: a server that asks for it is sent there, and
        waits. Content of another origin is not shown. It is not written down;
        after a crash the region is shown as it is.
        """
        key = (address, index)
        with self._lock:
            device = self._reported.get(address)
            region = device.find_region(index) if device else None
            mine = self._with_content(address, region) if region else None
            if mine and mine.origin == model.OPERATOR:
                self._returning[key] = mine
                self._generation += 1
        if key not in self._returning:
            yield
            return
        try:
            yield
        finally:
            with self._lock:
                del self._returning[key]
                self._generation += 1

    def all_returning(self) -> dict[Key, model.Region]:
        with self._lock:
            return dict(self._returning)

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what a region turned out to carry without programming,
        as an image under another name.

        :raises IllegalTransition: the region is being programmed.
        """
        key = (address, index)
        with self._writing:
            with self._lock:
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'The content of {address} region{index} cannot be '
                        f'noted while it is being programmed.')
            self._store.set_loaded(address, index, loaded)
            with self._lock:
                self._know(key, loaded)
                self._since[address] = next(self._clock)
        self.save()

    def name_function(self, function: str, region_type: str | None,
                      name: str | None) -> set[Key]:
        """Note in memory which name a function has in regions of a type: those
        that carry it from the operator, and of which no name is known from
        their programming.

        :param name: None: it has none.
        :returns: (address, index) of the regions that have another name now.
        """
        with self._lock:
            before = self._function_names()
            if name:
                self._names[function, region_type] = name
            else:
                self._names.pop((function, region_type), None)
            changed = dict(before.items() ^ self._function_names().items())
            self._generation += bool(changed)
            return set(changed)

    def _function_names(self) -> dict[Key, str | None]:
        return {(address, region.index):
                self._with_content(address, region).function_name
                for address, device in self._reported.items()
                for region in device.regions}

    def forget(self, address: str, index: int, origin: str | None) -> None:
        """Drop what is known of a region, because a guest may have changed it.

        The next scan says what it carries; call scan(addresses=[address])
        once the guest has returned the card.

        :param origin: durably noted as that of what the region carries: the
            project of the guest's server, or None where it is not known.
            model.OPERATOR: it is as if nothing had ever been programmed.
        :raises IllegalTransition: it is being programmed.
        """
        self.set_loaded(
            address, index, model.Loaded(None, None, None, '', origin))

    def note_open(self, device: model.Device) -> bool:
        """Note durably that servers could reprogram regions of a device: what
        these carry is of their projects from now on.

        :param device: as its driver has just found it.
        :returns: whether that is new.
        :raises AcceleratorsUnavailable: the store cannot be used.
        :raises IllegalTransition: a region is being programmed.
        """
        new = False
        claims = [c for c in self._store.claims()
                  if c.device_address == device.address]
        for region in device.regions:
            owners = {c.project_id for c in claims
                      if c.region_index == region.index}
            if not owners or not region.guest_can_reprogram:
                continue
            origin = owners.pop() if len(owners) == 1 else model.SOME_PROJECT
            as_read = model.Loaded(None, None, None, '', origin)
            if self._store.loaded().get(
                    (device.address, region.index)) != as_read:
                self.forget(device.address, region.index, origin)
                new = True
        return new

    def _know(self, key: Key, loaded: model.Loaded) -> None:
        # for drivers that cannot read it: what they said before counts
        device = self._reported.get(key[0])
        if device is not None:
            self._reported[key[0]] = device.with_region(
                key[1], function_uuid=loaded.function_uuid)
        self._generation += 1
