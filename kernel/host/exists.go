package host

import links "github.com/vishvananda/netlink"

// DeviceExists reports whether there is a network interface of that name.
func DeviceExists(name string) bool {
	_, err := links.LinkByName(name)
	return err == nil
}
