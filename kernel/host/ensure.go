package host

import (
	"errors"
	"fmt"
	"net"

	links "github.com/vishvananda/netlink"
)

// Ensure makes the interface again if another program has removed it, and brings it up if it is down. It says what had happened; ""
// for nothing. The interface has lost its addresses and routes then.
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
