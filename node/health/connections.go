package health

import (
	"net"
	"net/http"

	"k8s.io/utils/lru"
)

// connections limits the number of connections of servers. One too many closes the one that has been idle for longest: clients that
// hold connections open lose them, and clients that ask and read the answer are served, however many others there are.
type connections struct{ open *lru.Cache }

func newConnections(most int) *connections {
	return &connections{lru.NewWithEvictionFunc(most, func(conn lru.Key, _ any) {
		_ = conn.(net.Conn).Close() // Its server notices, or has closed it itself.
	})}
}

// changed is an http.Server's ConnState. No handler takes over a connection from its server.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		c.open.Add(conn, nil)
	case http.StateClosed:
		c.open.Remove(conn)
	default:
		c.open.Get(conn) // It is the one that has been idle for the shortest time now.
	}
}
