# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Values that the store keeps beside those of nova_accel.model."""

from collections.abc import Iterable, Mapping
import dataclasses


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the host knows of a device beside the report of its driver."""

    #: traits of earlier cards at the address, or of earlier shells of this
    #: card, which its providers must not have any more
    earlier_traits: tuple[str, ...] = ()
    #: signals of what nova-compute did with it, see health.signals.MARKS
    marks: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Iterable[str]]) -> 'Notes':
        """Return the notes that dataclasses.asdict() made a dict of."""
        return cls(tuple(fields.get('earlier_traits', ())),
                   tuple(fields.get('marks', ())))

    def with_mark(self, mark: str, is_so: bool) -> 'Notes':
        """Return these notes with a mark, or without it."""
        others = {*self.marks} - {mark}
        return dataclasses.replace(self, marks=tuple(sorted(
            {*others, mark} if is_so else others)))
