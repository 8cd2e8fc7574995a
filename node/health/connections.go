package health

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// connections limits the number of connections of servers. One too many closes the one that has been idle for longest: clients that
// hold connections open lose them, and clients that ask and read the answer are served, however many others there are.
type connections struct {
	most int

	mu     sync.Mutex
	open   map[net.Conn]*list.Element
	oldest list.List // of net.Conn, the one that has been idle for longest first
}

func newConnections(most int) *connections {
	return &connections{most: most, open: map[net.Conn]*list.Element{}}
}

// changed is an http.Server's ConnState.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	var surplus net.Conn
	c.mu.Lock()
	at := c.open[conn]
	switch {
	case state == http.StateClosed || state == http.StateHijacked:
		c.remove(conn)
	case at != nil:
		c.oldest.MoveToBack(at)
	case state == http.StateNew:
		c.open[conn] = c.oldest.PushBack(conn)
		if len(c.open) > c.most {
			surplus = c.oldest.Front().Value.(net.Conn)
			c.remove(surplus)
		}
	}
	c.mu.Unlock()
	if surplus != nil {
		_ = surplus.Close() // Its server notices and forgets it.
	}
}

func (c *connections) remove(conn net.Conn) {
	if at := c.open[conn]; at != nil {
		c.oldest.Remove(at)
		delete(c.open, conn)
	}
}
