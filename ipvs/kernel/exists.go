package kernel

import "github.com/vishvananda/netlink"

// DeviceExists reports whether there is a network interface of that name.
func DeviceExists(name string) bool {
	_, err := netlink.LinkByName(name)
	return err == nil
}
