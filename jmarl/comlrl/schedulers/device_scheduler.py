"""Devices of torch at their module path in CoMLRL. They are not part of jmarl, and refuse to be used."""

from jmarl.comlrl.only_in_comlrl import refused_class

DeviceScheduler = refused_class("DeviceScheduler")
