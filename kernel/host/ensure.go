package host

import (
	"errors"
	"fmt"
	"net"

	links "github.com/vishvananda/netlink"
)

// Ensure makes the interface again if somebody has removed it, and turns it on if somebody has turned it off. It returns which
// of these had happened, in words; empty if nothing had. Addresses and routes have gone with the interface then.
func (d *Device) Ensure() (mended string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	link, err := d.handle.LinkByName(d.name)
	switch {
	case err == nil && link.Attrs().Index == d.link.Attrs().Index && link.Attrs().Flags&net.FlagUp != 0:
		return "", nil
	case err == nil && link.Attrs().Index == d.link.Attrs().Index:
		mended = "turned off"
	case err == nil:
		mended = "removed and made again"
	case !errors.As(err, new(links.LinkNotFoundError)):
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	default:
		mended = "removed"
	}
	old := d.conn
	if err := d.open(); err != nil {
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	}
	return mended, old.Close()
}
