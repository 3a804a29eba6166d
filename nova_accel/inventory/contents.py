# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the content of the regions of FPGAs.

The content of a region has one of these states:

===================  ============================  ===========================
State                Begins with                   Ends with
===================  ============================  ===========================
as the driver reads  forget(), ended(report=True)  begin(), set_loaded()
being programmed     begin(), which stores it as   programmed(), ended()
                     unknown, with its origin
known                programmed(), set_loaded()    begin(), forget()
unknown              ended(report=False), or a     begin(), forget(),
                     crash during programming      set_loaded()
===================  ============================  ===========================

Any other transition raises IllegalTransition. Each content has an origin
(model.Region.origin):

===================  =========================================================
State                Origin
===================  =========================================================
as the driver reads  the operator, until forget() sets another origin, or
                     note_open() the project whose server could reprogram the
                     region
known                the origin of the image. If the driver reads another
                     function later, for example after a power cut, the
                     operator is no longer the origin, but unknown. A project
                     stays the origin, because a function of a project can
                     report any UUID
being programmed,    a project if the image or the previous content is a
unknown, and as the  project's, otherwise unknown. The card may have taken
driver reads after   all of the image, a part of it or nothing
ended()
===================  =========================================================
"""

from collections.abc import Iterator
import contextlib
import dataclasses

from nova_accel import exception
from nova_accel.inventory import reports as device_reports
from nova_accel import model
from nova_accel.store import claim_store

Key = tuple[str, int]


class Contents:

    def __init__(self, reports: device_reports.Reports,
                 store: claim_store.ClaimStore):
        self._reports = reports
        self._store = store
        self._programming: set[Key] = set()
        #: regions that are being cleaned, with their earlier content
        self._returning: dict[Key, model.Region] = {}

    def with_content(self, address: str, region: model.Region,
                     ) -> model.Region:
        """Return a region as its driver has reported it, completed by the
        stored content."""
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
        if (function, image, name, origin) == (
                region.function_uuid, region.bitstream_id,
                region.function_name, region.origin):
            return region
        return dataclasses.replace(
            region, function_uuid=function, bitstream_id=image,
            function_name=name, origin=origin)

    def content_of(self, address: str, index: int, image_id: str) -> str:
        """Return the stored hash of an image if the region was last programmed
        with this image, otherwise ''."""
        loaded = self._store.loaded().get((address, index))
        return (loaded.content or '' if loaded
                and loaded.bitstream_id == image_id else '')

    def is_unknown(self, address: str, index: int | None) -> bool:
        """Return whether the content of a region is unknown.

        The content is unknown while a programming runs or hangs, and after a
        crash during a programming.
        """
        return index is not None and self._store.loaded().get(
            (address, index), model.AS_READ).content is None

    def _region(self, address: str, index: int) -> model.Region:
        device = self._reports.reported(address)
        region = device.find_region(index) if device else None
        if region:
            return self.with_content(address, region)
        found = (f'{address} region{index} cannot be programmed, because it '
                 f'is not on this host any more')
        raise exception.DeviceUnavailable(
            f'{found}: build the server on another.', found=found)

    def is_programming(self, address: str) -> bool:
        """Return whether a region of a device is being programmed."""
        with self._reports.lock:
            return any(a == address for a, _ in self._programming)

    def begin(self, address: str, index: int, origin: str | None) -> None:
        """Mark the content of a region as unknown in the store before it is
        programmed.

        The origin becomes a project if the old or the new content is a
        project's. Scans of the card are discarded until programmed() or
        Inventory.programming_failed().

        :param origin: origin of the image, or None if Glance does not name its
            owner.
        :raises IllegalTransition: the region is being programmed already.
        :raises DeviceUnavailable: the region is not on this host.
        :raises AcceleratorsUnavailable: the store cannot be written; nothing
            has changed.
        """
        key = (address, index)
        with self._reports.writing:
            with self._reports.lock:
                before = self._region(address, index)
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'{address} region{index} cannot be programmed while '
                        f'it is being programmed.')
            unknown = model.Loaded(
                None, None, None, None, before.origin_with(origin))
            self._store.set_loaded(address, index, unknown)
            with self._reports.lock:
                self._programming.add(key)
                self._know(key, unknown)
        self._reports.save()

    def programmed(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Store the content of a region that was programmed and read back.

        :raises IllegalTransition: the region is not being programmed.
        :raises AcceleratorsUnavailable: the store cannot be written; the
            content of the region is unknown.
        """
        with self._reports.writing:
            self._ends((address, index))
            # a store that fails leaves the region unknown
            self._store.set_loaded(address, index, loaded)
            with self._reports.lock:
                self._know((address, index), loaded)
        self._reports.save()

    def ended(self, address: str, index: int, report: bool) -> None:
        """End a programming that did not succeed; see
        Inventory.programming_failed()."""
        origin = self._ends((address, index))
        if report:
            self.forget(address, index, origin)

    def _ends(self, key: Key) -> str | None:
        """End the programming of a region, and return the origin that begin()
        stored."""
        with self._reports.lock:
            if key not in self._programming:
                raise exception.IllegalTransition(
                    f'The programming of {key[0]} region{key[1]} cannot end, '
                    f'because none had begun.')
            self._programming.discard(key)
            self._reports.invalidate(key[0])
            return self._store.loaded()[key].origin

    @contextlib.contextmanager
    def returning(self, address: str, index: int) -> Iterator[None]:
        """Let providers show the last content of a region while the region is
        cleaned inside the context.

        This applies only to content of the operator, which stays or is
        programmed again: a server that requests it is scheduled to the region,
        and waits. After a crash, providers show the region as its driver reads
        it.
        """
        key = (address, index)
        with self._reports.lock:
            device = self._reports.reported(address)
            region = device.find_region(index) if device else None
            mine = self.with_content(address, region) if region else None
            if mine and mine.origin == model.OPERATOR:
                self._returning[key] = mine
                self._reports.changed()
        if key not in self._returning:
            yield
            return
        try:
            yield
        finally:
            with self._reports.lock:
                del self._returning[key]
                self._reports.changed()

    def all_returning(self) -> dict[Key, model.Region]:
        """Return the regions that are being cleaned while their providers still
        show the last content. The regions have that content; see returning().
        """
        with self._reports.lock:
            return dict(self._returning)

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Store the content of a region without a programming, for example
        because the image has a new name in Glance.

        :raises IllegalTransition: the region is being programmed.
        """
        key = (address, index)
        with self._reports.writing:
            with self._reports.lock:
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'The content of {address} region{index} cannot be '
                        f'noted while it is being programmed.')
            self._store.set_loaded(address, index, loaded)
            with self._reports.lock:
                self._know(key, loaded)
                self._reports.invalidate(address)
        self._reports.save()

    def forget(self, address: str, index: int, origin: str | None) -> None:
        """Discard the content of a region, because a guest may have changed it.

        The next scan reads the content; call scan(addresses=[address]) once
        the guest has released the card.

        :param origin: the origin to store: the project of the guest's server,
            None if unknown, or model.OPERATOR for content of the operator.
        :raises IllegalTransition: the region is being programmed.
        """
        self.set_loaded(
            address, index, model.Loaded(None, None, None, '', origin))

    def note_open(self, device: model.Device) -> bool:
        """Store that the content of regions comes from the projects of the
        servers with claims on them, if the guests of these servers could
        reprogram the regions.

        :param device: as its driver has just reported it.
        :returns: whether the origin of a region has changed.
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
        device = self._reports.reported(key[0])
        if device is None:
            self._reports.changed()
            return
        # for drivers that cannot read the function: the last programmed one
        # counts
        self._reports.put(device.with_region(
            key[1], function_uuid=loaded.function_uuid))
