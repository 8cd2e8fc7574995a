package host

import (
	"errors"
	"fmt"
	"net"

	links "github.com/vishvananda/netlink"
)

// Ensure makes the interface again if somebody has removed it, and turns it on if somebody has turned it off. It returns which
// of these had happened, in words; "" if neither had. Addresses and routes have gone with the interface then.
func (d *Device) Ensure() (repaired string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	link, err := d.handle.LinkByName(d.name)
	switch {
	case err == nil && link.Attrs().Index == d.link.Attrs().Index && link.Attrs().Flags&net.FlagUp != 0:
		return "", nil
	case err == nil && link.Attrs().Index == d.link.Attrs().Index:
		repaired = "turned off"
	case err == nil:
		repaired = "removed and made again"
	case !errors.As(err, new(links.LinkNotFoundError)):
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	default:
		repaired = "removed"
	}
	old := d.conn
	if err := d.open(); err != nil {
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	}
	return repaired, old.Close()
}
