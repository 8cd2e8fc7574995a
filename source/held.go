package source

import "sync"

// Held is a Sink that keeps what it is given until it is told where that goes. It keeps objects that there are, and none that
// have gone in the meantime, so it may be left waiting for as long as need be.
type Held struct {
	mu     sync.Mutex
	kept   Batch
	next   Sink
	synced chan struct{} // closed once everything has been delivered; nil while nobody asks
	all    bool          // whether it has
}

// Synced is closed once the source has delivered everything that it had at the start.
func (h *Held) Synced() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.synced == nil {
		h.synced = make(chan struct{})
		if h.all {
			close(h.synced)
		}
	}
	return h.synced
}

// Apply implements Sink.
func (h *Held) Apply(b Batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b.Synced && !h.all {
		h.all = true
		if h.synced != nil {
			close(h.synced)
		}
	}
	if h.next != nil {
		h.next.Apply(b)
		return
	}
	h.kept.Merge(b)
	forget(h.kept.Services, b.Services)
	forget(h.kept.EndpointSlices, b.EndpointSlices)
	forget(h.kept.ServiceCIDRs, b.ServiceCIDRs)
}

// PassTo gives next all that has come, as one batch, and from then on each batch as it comes.
func (h *Held) PassTo(next Sink) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next = next
	if !h.kept.Empty() {
		next.Apply(h.kept)
	}
	h.kept = Batch{}
}

// forget takes objects out of kept that are gone by a batch: nobody has been told of them.
func forget[K comparable, V any](kept, batch map[K]*V) {
	for k, v := range batch {
		if v == nil {
			delete(kept, k)
		}
	}
}
