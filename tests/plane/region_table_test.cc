// SPDX-License-Identifier: Apache-2.0
//
// Goal: regions come and go without a trace, within their limits, for their owner and tenant alone,
// and never under a pass. Method: tables of this process; what the process has open and mapped is
// read from /proc.
#include "plane/region_table.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd::plane {
namespace {

using ::testing::HasSubstr;

constexpr RegionLimits kLimits = {.bytes_max = 65536, .regions_max = 5, .client_regions_max = 3};

// Descriptors and mappings of memfds that this process has.
size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}
size_t MappedRegions() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:attnd-region") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(RegionTableTest, TenThousandRegionsLeaveNothing) {
  RegionTable table(kLimits);
  const size_t descriptors = OpenDescriptors(), mapped = MappedRegions();
  for (int i = 0; i < 10'000; ++i) {
    const auto region = table.Register(1, "", 4096);
    ASSERT_TRUE(region.ok()) << i << ": " << region.status();
    if (i % 2 == 0) {
      ASSERT_TRUE(table.Unregister(1, region->info.id).ok());
    } else {
      table.RemoveOwner(1);
    }
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(MappedRegions(), mapped);
  EXPECT_EQ(table.usage().regions, 0u);
  EXPECT_EQ(table.usage().bytes, 0u);
}

TEST(RegionTableTest, LimitsAreNamed) {
  RegionTable table(kLimits);
  EXPECT_TRUE(absl::IsInvalidArgument(table.Register(1, "", 0).status()));
  for (const uint64_t bytes : {uint64_t{65537}, ~uint64_t{0}}) {
    const auto refused = table.Register(1, "", bytes);
    EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("client_memory_bytes"));
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("allowed are 65536"));
  }
  // All but a page, of which a byte takes all.
  ASSERT_TRUE(table.Register(1, "", 61440 - 4095).ok());
  EXPECT_FALSE(table.Register(1, "", 4097).ok());
  ASSERT_TRUE(table.Register(1, "", 1).ok());
  EXPECT_EQ(table.usage().bytes, 65536u);
  EXPECT_FALSE(table.Register(1, "", 1).ok());
  table.RemoveOwner(1);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(table.Register(1, "", 1).ok());
  EXPECT_THAT(std::string(table.Register(1, "", 1).status().message()),
              HasSubstr("this client has registered 3 regions; allowed are 3"));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(table.Register(2, "", 1).ok());
  EXPECT_THAT(std::string(table.Register(3, "", 1).status().message()),
              HasSubstr("max_memory_regions: 5"));
}

TEST(RegionTableTest, ARegionIsItsOwnersAndItsTenants) {
  RegionTable table(kLimits);
  const uint64_t mine = table.Register(1, "a", 1)->info.id;
  const uint64_t other = table.Register(2, "b", 1)->info.id;
  EXPECT_NE(mine, other);
  EXPECT_TRUE(absl::IsNotFound(table.Unregister(2, mine)));
  ASSERT_EQ(table.List(1).size(), 1u);
  EXPECT_EQ(table.List(1)[0].id, mine);
  EXPECT_EQ(table.List(1)[0].bytes, 4096u);
  EXPECT_TRUE(absl::IsNotFound(table.Use("region_id", "b", mine).status()));
  EXPECT_TRUE(absl::IsNotFound(table.Use("region_id", "a", mine + 1).status()));
  EXPECT_TRUE(table.Use("region_id", "a", mine).ok());
  table.RemoveOwner(2);
  EXPECT_TRUE(absl::IsNotFound(table.Use("region_id", "b", other).status()));
  EXPECT_TRUE(table.Use("region_id", "a", mine).ok());
}

TEST(RegionTableTest, APassKeepsItsRegionAlone) {
  RegionTable table(kLimits);
  const uint64_t id = table.Register(1, "", 4096)->info.id;
  {
    auto use = table.Use("region_id", "", id);
    ASSERT_TRUE(use.ok());
    EXPECT_TRUE(table.List(1)[0].in_use);
    EXPECT_TRUE(absl::IsAborted(table.Use("region_id", "", id).status()));
    // Gone for everybody else, but not from under the pass, and it still counts.
    ASSERT_TRUE(table.Unregister(1, id).ok());
    EXPECT_TRUE(absl::IsNotFound(table.Unregister(1, id)));
    EXPECT_TRUE(absl::IsNotFound(table.Use("region_id", "", id).status()));
    EXPECT_TRUE(table.List(1).empty());
    EXPECT_EQ(table.usage().bytes, 4096u);
    table.RemoveOwner(1);
    const RegionUse moved = *std::move(use);
    EXPECT_EQ(moved.bytes(), 4096u);
    moved.data()[4095] = std::byte{1};
  }
  EXPECT_EQ(table.usage().bytes, 0u);
  EXPECT_EQ(table.usage().regions, 0u);
}

// A device's memory is what the test gives out.
class Twins : public ::testing::Test {
 protected:
  static constexpr uint64_t kUnit = kSharedDeviceUnitBytes;
  static constexpr char kDevice[] = "a device";
  RegionDevice Device() {
    return {.map = [](std::byte* data, uint64_t) { return std::make_shared<int>(data != nullptr); },
            .uuid = kDevice,
            .make_twin = [this](uint64_t bytes) -> absl::StatusOr<SharedDeviceMemory> {
              if (refused_) return absl::ResourceExhaustedError("planted");
              EXPECT_EQ(bytes % kUnit, 0u);
              SharedDeviceMemory made;
              made.data = memory_;
              made.memory = held_;
              return made;
            }};
  }

  std::byte memory_[1] = {};
  const std::shared_ptr<int> held_ = std::make_shared<int>();
  bool refused_ = false;
  RegionTable table_{{.bytes_max = 1 << 20,
                      .twin_bytes_max = 2 * kUnit,
                      .regions_max = 9,
                      .client_regions_max = 9},
                     Device()};
};

TEST_F(Twins, ARegionMayHaveOne) {
  auto region = table_.Register(1, "", 5000, kDevice);
  ASSERT_TRUE(region.ok() && region->twin.ok()) << region->twin.status();
  EXPECT_EQ(region->twin->bytes, kUnit);
  EXPECT_EQ(table_.usage().twin_bytes, kUnit);
  EXPECT_EQ(table_.Use("region_id", "", region->info.id)->twin(), memory_);
  const auto without = table_.Register(1, "", 5000);
  ASSERT_TRUE(without.ok());
  EXPECT_TRUE(absl::IsUnimplemented(without->twin.status()));
  EXPECT_EQ(table_.Use("region_id", "", without->info.id)->twin(), nullptr);
  EXPECT_EQ(table_.usage().twin_bytes, kUnit);
}

// It goes with its region, under a pass when that ends.
TEST_F(Twins, TheyGoWithTheirRegions) {
  const uint64_t first = table_.Register(1, "", 1, kDevice)->info.id;
  const uint64_t second = table_.Register(1, "", 1, kDevice)->info.id;
  EXPECT_EQ(held_.use_count(), 3);
  ASSERT_TRUE(table_.Unregister(1, first).ok());
  EXPECT_EQ(held_.use_count(), 2);
  {
    const auto use = table_.Use("region_id", "", second);
    table_.RemoveOwner(1);
    EXPECT_EQ(held_.use_count(), 2);
    EXPECT_EQ(table_.usage().twin_bytes, kUnit);
  }
  EXPECT_EQ(held_.use_count(), 1);
  EXPECT_EQ(table_.usage().twin_bytes, 0u);
}

// A region comes without one, and the reason is told.
TEST_F(Twins, TheyAreLimited) {
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(table_.Register(1, "", 1, kDevice)->twin.ok());
  const auto beyond = table_.Register(1, "", 1, kDevice);
  ASSERT_TRUE(beyond.ok());
  EXPECT_THAT(std::string(beyond->twin.status().message()),
              HasSubstr("client_device_memory_bytes: a twin of 2097152 bytes"));
  table_.RemoveOwner(1);
  refused_ = true;
  const auto refused = table_.Register(1, "", 1, kDevice);
  ASSERT_TRUE(refused.ok());
  EXPECT_EQ(refused->twin.status(), absl::ResourceExhaustedError("planted"));
  EXPECT_EQ(table_.usage().twin_bytes, 0u);
}

// And the reason is told, which is no limit's.
TEST_F(Twins, SomeCannotHaveOne) {
  const auto why = [](RegionTable* table, const std::string& device) {
    const absl::Status status = table->Register(1, "", 1, device)->twin.status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why(&table_, "another"), HasSubstr("another one"));
  const auto table_with = [](uint64_t bytes, const RegionDevice& device) {
    return std::make_unique<RegionTable>(RegionLimits{.bytes_max = 1 << 20,
                                                      .twin_bytes_max = bytes,
                                                      .regions_max = 1,
                                                      .client_regions_max = 1},
                                         device);
  };
  EXPECT_THAT(why(table_with(0, Device()).get(), kDevice), HasSubstr("client_device_memory_bytes"));
  EXPECT_THAT(why(table_with(kUnit, {}).get(), kDevice), HasSubstr("shares no memory"));
  RegionDevice blind = Device();
  blind.map = [](std::byte*, uint64_t) { return nullptr; };
  EXPECT_THAT(why(table_with(kUnit, blind).get(), kDevice), HasSubstr("does not see"));
}

TEST(RegionTableTest, ThreadsComeAndGo) {
  RegionTable table({.bytes_max = 1 << 20, .regions_max = 64, .client_regions_max = 16});
  std::vector<std::thread> threads;
  std::atomic<uint64_t> last{0};
  for (OwnerId owner = 1; owner <= 3; ++owner) {
    threads.emplace_back([&table, &last, owner] {
      for (int i = 0; i < 300; ++i) {
        const auto region = table.Register(owner, "", 4096);
        ASSERT_TRUE(region.ok());
        last = region->info.id;
        // Of one's own, or of another who may just have removed it.
        const auto use = table.Use("region_id", "", last);
        if (use.ok()) use->data()[owner] = std::byte{1};
        if (i % 3 == 0) {
          table.RemoveOwner(owner);
        } else {
          ASSERT_TRUE(table.Unregister(owner, region->info.id).ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.usage().bytes, 0u);
}

}  // namespace
}  // namespace attnd::plane
