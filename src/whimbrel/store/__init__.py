"""The central store: versions of keys, where every site finds them when another is no more.

`CentralStore` is the store itself, `Uploader` the way of an instance's savings to it, `Keeper` what looks after it.
"""

from whimbrel.core.saving import Version
from whimbrel.store.central import CentralStore
from whimbrel.store.keeper import Keeper
from whimbrel.store.uploader import Uploader
from whimbrel.store.version import Checkpoint, Owner, Retention, Saving

__all__ = ["CentralStore", "Checkpoint", "Keeper", "Owner", "Retention", "Saving", "Uploader", "Version"]
